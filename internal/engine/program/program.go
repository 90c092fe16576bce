// Package program says why the kernel does not execute a file of a container: what
// a runtime passes on of it is "exec format error", or that a file is absent
// which is there.
//
// The file is looked at as the container sees it, below its root, and nothing of
// it is executed. It is anybody's: what is read of it is bounded, and what does not
// fit counts as not understood.
package program

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// host is the machine whose programs the kernel executes.
var host = map[string]elf.Machine{
	"386": elf.EM_386, "amd64": elf.EM_X86_64, "arm": elf.EM_ARM, "arm64": elf.EM_AARCH64,
	"loong64": elf.EM_LOONGARCH,
	"ppc64le": elf.EM_PPC64, "riscv64": elf.EM_RISCV, "s390x": elf.EM_S390,
}[runtime.GOARCH]

// names are the machines' as "uname -m" has them.
var names = map[elf.Machine]string{
	elf.EM_386: "i386", elf.EM_X86_64: "x86_64", elf.EM_ARM: "arm", elf.EM_AARCH64: "aarch64",
	elf.EM_LOONGARCH: "loongarch64",
	elf.EM_MIPS:      "mips", elf.EM_PPC: "ppc", elf.EM_PPC64: "ppc64", elf.EM_RISCV: "riscv64",
	elf.EM_S390: "s390x",
}

func nameOf(m elf.Machine) string {
	if n, ok := names[m]; ok {
		return n
	}
	return fmt.Sprintf("number %d", m)
}

const (
	headBytes    = 4096 // that are read of a file; the kernel itself looks at 256 for a script's first line
	interpreters = 4    // interpreters of interpreters that are looked at
)

// Why says in words what is wrong with the file at name below root, and what to
// do; "" if it sees nothing wrong, or no such file.
func Why(root, name string) string {
	dir, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return ""
	}
	defer unix.Close(dir)
	return why(dir, name, interpreters)
}

func why(dir int, name string, depth int) string {
	head, err := headOf(dir, name)
	switch {
	case err != nil:
		return ""
	case len(head) == 0:
		return name + " is an empty file: build the image anew, or name another command"
	case bytes.HasPrefix(head, []byte(elf.ELFMAG)):
		return ofELF(dir, name, head)
	case bytes.HasPrefix(head, []byte("#!")):
		return ofScript(dir, name, head, depth)
	}
	return name + ` is neither a program for Linux nor a script that begins with "#!": name the program that is to read it, or another command`
}

// headOf reads the beginning of a file below dir.
func headOf(dir int, name string) ([]byte, error) {
	fd, err := unix.Openat2(dir, name,
		&unix.OpenHow{Flags: unix.O_RDONLY | unix.O_NONBLOCK | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT})
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	if st, err := f.Stat(); err != nil || !st.Mode().IsRegular() {
		return nil, errors.Join(err, unix.EINVAL)
	}
	return io.ReadAll(io.LimitReader(f, headBytes))
}

// absent says whether there is no such file below dir.
func absent(dir int, name string) bool {
	_, err := headOf(dir, name)
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR)
}

// ofScript looks at what a script is for.
func ofScript(dir int, name string, head []byte, depth int) string {
	line, _, _ := bytes.Cut(head[2:], []byte("\n"))
	if bytes.HasSuffix(line, []byte("\r")) {
		return name + " is a script whose lines end as on Windows, with a carriage return, which the kernel takes for a part of its interpreter's name: save it with Unix's line ends"
	}
	fields := strings.Fields(string(line))
	if len(fields) == 0 {
		return name + ` is a script that names no interpreter behind "#!": write one there`
	}
	by := path.Join("/", fields[0])
	if absent(dir, by) {
		return fmt.Sprintf("%s is a script for %q, which the container does not have: use an image that has it, or another interpreter", name, fields[0])
	}
	if depth == 0 {
		return ""
	}
	if of := why(dir, by, depth-1); of != "" {
		return name + " is a script for " + by + ", and " + of
	}
	return ""
}

// ofELF looks at a program's machine, and whether what it is linked with is there.
func ofELF(dir int, name string, head []byte) string {
	if len(head) < binary.Size(elf.Header32{}) {
		return name + " is the beginning of a program and no more: build the image anew"
	}
	var order binary.ByteOrder = binary.LittleEndian
	if elf.Data(head[elf.EI_DATA]) == elf.ELFDATA2MSB {
		order = binary.BigEndian
	}
	if m := elf.Machine(order.Uint16(head[18:])); m != host {
		return fmt.Sprintf("%s is a program of another architecture (%s) than this machine's (%s): deploy an image that was built for linux/%s",
			name, nameOf(m), nameOf(host), runtime.GOARCH)
	}
	loader := loaderOf(head, order)
	if loader == "" {
		return ""
	}
	if absent(dir, loader) {
		return fmt.Sprintf("%s needs %s to be loaded, which the container does not have: build it static, or use an image with the C library that it was built for", name, loader)
	}
	return ""
}

// loaderOf is the interpreter that a program names; "" if none is found in its head.
func loaderOf(head []byte, order binary.ByteOrder) string {
	if elf.Class(head[elf.EI_CLASS]) != elf.ELFCLASS64 || len(head) < binary.Size(elf.Header64{}) {
		return ""
	}
	at, size, n := order.Uint64(head[32:]), uint64(order.Uint16(head[54:])), uint64(order.Uint16(head[56:]))
	if size < uint64(binary.Size(elf.Prog64{})) {
		return ""
	}
	for i := range n {
		p := part(head, at+i*size, size)
		if p == nil {
			return ""
		}
		if elf.ProgType(order.Uint32(p)) == elf.PT_INTERP {
			text, _, _ := bytes.Cut(part(head, order.Uint64(p[8:]), order.Uint64(p[32:])), []byte{0})
			if !path.IsAbs(string(text)) {
				return ""
			}
			return string(text)
		}
	}
	return ""
}

// part is size bytes of head from at on; nil if it does not have them.
func part(head []byte, at, size uint64) []byte {
	if n := uint64(len(head)); at > n || size > n-at {
		return nil
	}
	return head[at : at+size]
}
