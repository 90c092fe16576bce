package hooks

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"fmt"
)

// randPoll is a shared object without code: its one initialiser is another
// library's function, RAND_poll of the OpenSSL that the loading program carries,
// which reseeds OpenSSL's generators from the kernel. Node offers its programs
// no other way to that. Where no such function is, loading it fails and nothing
// has happened. It needs no C library and runs with any.
//
// The file is one loadable segment: headers, dynamic section, symbols, strings,
// hash, relocation, and the slot that the relocation fills.
func randPoll(machine elf.Machine) ([]byte, error) {
	absolute, ok := map[elf.Machine]uint64{
		elf.EM_X86_64:  uint64(elf.R_X86_64_64),
		elf.EM_AARCH64: uint64(elf.R_AARCH64_ABS64),
	}[machine]
	if !ok {
		return nil, fmt.Errorf("no shared object for machine %v", machine)
	}
	const (
		programs = 64
		dynamic  = programs + 3*56
		symbols  = dynamic + 11*16
		names    = symbols + 2*24
		hash     = names + 16
		reloc    = hash + 24
		slot     = reloc + 24
		size     = slot + 8
	)
	strings := "\x00RAND_poll\x00"
	var b bytes.Buffer
	put := func(v any) { _ = binary.Write(&b, binary.LittleEndian, v) } // a Buffer takes everything
	h := elf.Header64{
		Type: uint16(elf.ET_DYN), Machine: uint16(machine), Version: 1, Phoff: programs,
		Ehsize: programs, Phentsize: 56, Phnum: 3,
	}
	copy(h.Ident[:], "\x7fELF\x02\x01\x01")
	put(h)
	rw := uint32(elf.PF_R | elf.PF_W)
	put(elf.Prog64{Type: uint32(elf.PT_LOAD), Flags: rw, Filesz: size, Memsz: size, Align: 1 << 16})
	put(elf.Prog64{Type: uint32(elf.PT_DYNAMIC), Flags: rw, Off: dynamic, Vaddr: dynamic, Filesz: 11 * 16,
		Memsz: 11 * 16, Align: 8})
	put(elf.Prog64{Type: uint32(elf.PT_GNU_STACK), Flags: rw, Align: 16})
	for _, d := range []struct{ tag, value uint64 }{
		{uint64(elf.DT_HASH), hash},
		{uint64(elf.DT_STRTAB), names}, {uint64(elf.DT_STRSZ), uint64(len(strings))},
		{uint64(elf.DT_SYMTAB), symbols}, {uint64(elf.DT_SYMENT), 24},
		{uint64(elf.DT_RELA), reloc}, {uint64(elf.DT_RELASZ), 24}, {uint64(elf.DT_RELAENT), 24},
		{uint64(elf.DT_INIT_ARRAY), slot}, {uint64(elf.DT_INIT_ARRAYSZ), 8},
		{uint64(elf.DT_NULL), 0},
	} {
		put([]uint64{d.tag, d.value})
	}
	put(elf.Sym64{})
	put(elf.Sym64{Name: 1, Info: elf.ST_INFO(elf.STB_GLOBAL, elf.STT_FUNC)})
	b.WriteString(strings + "\x00\x00\x00\x00\x00")
	put([]uint32{1, 2, 0, 0, 0, 0})
	put(elf.Rela64{Off: slot, Info: 1<<32 | absolute})
	put(uint64(0))
	return b.Bytes(), nil
}
