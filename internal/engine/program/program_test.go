package program

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// program makes the head of an ELF file for a machine, which names that loader unless it is "".
func program(machine elf.Machine, loader string) []byte {
	h := elf.Header64{Type: uint16(elf.ET_EXEC), Machine: uint16(machine), Version: 1, Phoff: 64, Phentsize: 56,
		Phnum: 2, Ehsize: 64}
	copy(h.Ident[:], elf.ELFMAG)
	h.Ident[elf.EI_CLASS], h.Ident[elf.EI_DATA], h.Ident[elf.EI_VERSION] = byte(elf.ELFCLASS64),
		byte(elf.ELFDATA2LSB), 1
	var b bytes.Buffer
	load, interp := elf.Prog64{Type: uint32(elf.PT_LOAD)}, elf.Prog64{Type: uint32(elf.PT_NULL)}
	if loader != "" {
		interp = elf.Prog64{Type: uint32(elf.PT_INTERP), Off: 64 + 2*56, Filesz: uint64(len(loader) + 1)}
	}
	for _, v := range []any{h, load, interp, []byte(loader + "\x00")} {
		if err := binary.Write(&b, binary.LittleEndian, v); err != nil {
			panic(err)
		}
	}
	return b.Bytes()
}

func TestWhy(t *testing.T) {
	other, its := elf.EM_AARCH64, "(aarch64)"
	if host == other {
		other, its = elf.EM_X86_64, "(x86_64)"
	}
	root := t.TempDir()
	files := map[string][]byte{
		"empty": nil, "garbage": []byte("hello\n"), "other": program(other, ""), "cut": program(host, "")[:30],
		"static": program(host, ""),
		"nolib":  program(host, "/lib/ld-none.so.1"), "lib": program(host, "/static"),
		"big":    {0x7f, 'E', 'L', 'F', 2, 2, 60: 0},
		"script": []byte("#!/static -x\n"), "nosh": []byte("#! /bin/nosh\necho\n"),
		"windows": []byte("#!/static\r\n"), "blank": []byte("#! \n"),
		"othersh": []byte("#!/other\n"), "itself": []byte("#!/itself\n"),
	}
	for name, b := range files {
		if err := os.WriteFile(filepath.Join(root, name), b, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for name, to := range map[string]string{"link": "/other", "out": "../../../../../other", "loop": "loop"} {
		if err := os.Symlink(to, filepath.Join(root, name)); err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range map[string]string{
		"empty": "/empty is an empty file", "garbage": "/garbage is neither", "other": its,
		"cut": "/cut is the beginning", "static": "", "lib": "",
		"nolib": "/lib/ld-none.so.1", "big": "(number 0)", "script": "", "nosh": `a script for "/bin/nosh"`,
		"windows": "carriage return",
		"blank":   "names no interpreter",
		"othersh": "/othersh is a script for /other, and /other is a program of another", "itself": "",
		"link": its, "out": its, "loop": "", "absent": "", ".": "",
	} {
		got := Why(root, "/"+name)
		if want == "" && got != "" || !strings.Contains(got, want) {
			t.Errorf("%s: %q; want %q", name, got, want)
		}
	}
	if got := Why(filepath.Join(root, "absent"), "/x"); got != "" {
		t.Error(got)
	}
}

// Of programs that the kernel executes nothing is said.
func TestWhyNot(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	sh, err := exec.LookPath("sh")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range []string{self, sh} {
		if got := Why("/", p); got != "" {
			t.Errorf("%s: %s", p, got)
		}
	}
}

func FuzzELF(f *testing.F) {
	f.Add(program(host, "/lib/ld.so"))
	f.Add(program(elf.EM_AARCH64, ""))
	f.Add([]byte("\x7fELF"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) < 64 {
			return
		}
		if l := loaderOf(b, binary.LittleEndian); l != "" && !bytes.Contains(b, []byte(l)) {
			t.Errorf("%q", l)
		}
	})
}

// FuzzUnexecuted takes the end of a container's output.
func FuzzUnexecuted(f *testing.F) {
	f.Add("exec /a: exec format error")
	f.Add("x\n{\"msg\":\"exec container process `/a`: Permission denied\"}")
	f.Add("exec container process (missing dynamic library?) `/a`: No such file or directory")
	f.Fuzz(func(t *testing.T, said string) {
		file, why := Unexecuted(said)
		if (file == "") != (why == "") || file != "" && file[0] != '/' {
			t.Fatalf("%q: %q, %q", said, file, why)
		}
	})
}
