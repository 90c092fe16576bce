// Package jasm makes JVM class files and jars without a JDK, so that the JVM's
// agent is kept as source and built with the daemon.
//
// A source describes one class, a line each. Lines that begin with ; are comments.
//
//	class NAME SUPER
//	field NAME DESCRIPTOR                               always static
//	method [public] [static] NAME DESCRIPTOR STACK LOCALS
//	    LABEL:
//	    INSTRUCTION [OPERAND]                           as the JVM's specification names them
//	    try FROM TO HANDLER                             labels; whatever is thrown is caught
//
// Methods of other classes are written CLASS.NAME(ARGUMENTS)RESULT, with descriptors.
package jasm

import (
	"archive/zip"
	"bytes"
	"encoding/binary"
	"fmt"
	"strconv"
	"strings"
)

// Jar is an archive of the class that source describes, under the path name. Lines of manifest are added to
// those that each has. It is the same bytes each time.
func Jar(manifest, name, source string) ([]byte, error) {
	class, err := Assemble(source)
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	z := zip.NewWriter(&b)
	for _, f := range []struct {
		path string
		data []byte
	}{
		{"META-INF/MANIFEST.MF", []byte("Manifest-Version: 1.0\n" + manifest)},
		{name, class},
	} {
		w, err := z.Create(f.path)
		if err != nil {
			return nil, err
		}
		if _, err := w.Write(f.data); err != nil {
			return nil, err
		}
	}
	err = z.Close()
	return b.Bytes(), err
}

// Assemble translates a class to a class file of version 49, the newest whose methods need no
// stack maps: every JVM since Java 5 loads it.
func Assemble(source string) ([]byte, error) {
	a := assembler{index: map[string]uint16{}}
	for n, line := range strings.Split(source, "\n") {
		if strings.HasPrefix(line, ";") || strings.TrimSpace(line) == "" {
			continue
		}
		if err := a.line(strings.TrimSpace(line)); err != nil {
			return nil, fmt.Errorf("line %d, %q: %w", n+1, line, err)
		}
	}
	if err := a.endMethod(); err != nil {
		return nil, err
	}
	return a.file(), nil
}

type assembler struct {
	pool        bytes.Buffer
	index       map[string]uint16 // of the pool's entries, by their bytes
	this, super uint16
	fields      bytes.Buffer
	fieldCount  uint16
	methods     bytes.Buffer
	methodCount uint16
	m           *method // the one that is open, or nil
}

// method is what a method's lines have given so far.
type method struct {
	flags, name, descriptor uint16
	stack, locals           uint16
	code                    bytes.Buffer
	labels                  map[string]int
	jumps                   []jump
	tries                   [][]string // from, to, handler
}

type jump struct {
	at     int // of the instruction
	target string
}

const (
	accPublic = 1
	accStatic = 8
	accSuper  = 0x20
)

func put(b *bytes.Buffer, v any) { _ = binary.Write(b, binary.BigEndian, v) } // a Buffer takes everything

func (a *assembler) line(s string) error {
	w := strings.Fields(s)
	switch {
	case w[0] == "class" && len(w) == 3:
		a.this, a.super = a.class(w[1]), a.class(w[2])
	case w[0] == "field" && len(w) == 3:
		put(&a.fields, []uint16{accStatic, a.utf8(w[1]), a.utf8(w[2]), 0})
		a.fieldCount++
	case w[0] == "method":
		if err := a.endMethod(); err != nil {
			return err
		}
		return a.startMethod(w[1:])
	case a.m == nil:
		return fmt.Errorf("outside a method")
	case w[0] == "try" && len(w) == 4:
		a.m.tries = append(a.m.tries, w[1:])
	case strings.HasSuffix(s, ":") && len(w) == 1:
		a.m.labels[strings.TrimSuffix(s, ":")] = a.m.code.Len()
	default:
		op, operand, _ := strings.Cut(s, " ")
		return a.instruction(op, operand)
	}
	return nil
}

func (a *assembler) startMethod(w []string) error {
	m := &method{labels: map[string]int{}}
	for ; len(w) > 4; w = w[1:] {
		m.flags |= map[string]uint16{"public": accPublic, "static": accStatic}[w[0]]
	}
	if len(w) != 4 {
		return fmt.Errorf("want name, descriptor, stack, locals")
	}
	stack, err := strconv.ParseUint(w[2], 10, 16)
	if err != nil {
		return err
	}
	locals, err := strconv.ParseUint(w[3], 10, 16)
	m.name, m.descriptor = a.utf8(w[0]), a.utf8(w[1])
	m.stack, m.locals = uint16(stack), uint16(locals)
	a.m = m
	return err
}

var (
	plainOps = map[string]byte{
		"aconst_null": 1, "iconst_0": 3, "iconst_1": 4, "pop": 87, "dup": 89, "i2l": 133,
		"lreturn": 173, "areturn": 176, "return": 177,
	}
	byteOps   = map[string]byte{"aload": 25, "astore": 58, "newarray": 188}
	branchOps = map[string]byte{"ifeq": 153, "ifne": 154, "goto": 167, "ifnull": 198}
	classOps  = map[string]byte{"new": 187, "anewarray": 189, "checkcast": 192}
	memberOps = map[string]struct{ op, tag byte }{
		"getstatic": {178, 9}, "putstatic": {179, 9},
		"invokevirtual": {182, 10}, "invokespecial": {183, 10}, "invokestatic": {184, 10},
		"invokeinterface": {185, 11},
	}
)

func (a *assembler) instruction(name, operand string) error {
	c := &a.m.code
	if op, ok := plainOps[name]; ok {
		c.WriteByte(op)
	} else if op, ok := byteOps[name]; ok {
		n, err := strconv.ParseUint(operand, 10, 8)
		c.Write([]byte{op, byte(n)})
		return err
	} else if op, ok := branchOps[name]; ok {
		a.m.jumps = append(a.m.jumps, jump{at: c.Len(), target: operand})
		c.Write([]byte{op, 0, 0})
	} else if op, ok := classOps[name]; ok {
		c.WriteByte(op)
		put(c, a.class(operand))
	} else if op, ok := memberOps[name]; ok {
		return a.member(op.op, op.tag, operand)
	} else if name == "ldc" {
		return a.constant(operand)
	} else {
		return fmt.Errorf("no such instruction")
	}
	return nil
}

// member writes an instruction on CLASS.NAME:TYPE, a field, or CLASS.NAME(TYPES)TYPE.
func (a *assembler) member(op, tag byte, s string) error {
	end := strings.IndexAny(s, "(:")
	if end < 0 || strings.LastIndexByte(s[:end], '.') < 0 {
		return fmt.Errorf("%q names no member", s)
	}
	dot, descriptor := strings.LastIndexByte(s[:end], '.'), strings.TrimPrefix(s[end:], ":")
	typed := a.entry(12, a.utf8(s[dot+1:end]), a.utf8(descriptor))
	a.m.code.WriteByte(op)
	put(&a.m.code, a.entry(tag, a.class(s[:dot]), typed))
	if tag == 11 {
		a.m.code.Write([]byte{byte(1 + slots(descriptor)), 0})
	}
	return nil
}

// slots counts what a method's parameters take on the stack.
func slots(descriptor string) int {
	n := 0
	for s := descriptor[1:]; s[0] != ')'; s = s[1:] {
		n++
		if s[0] == 'J' || s[0] == 'D' {
			n++
		}
		s = strings.TrimLeft(s, "[")
		if s[0] == 'L' {
			s = s[strings.IndexByte(s, ';'):]
		}
	}
	return n
}

// constant loads a quoted string, a number, or a class.
func (a *assembler) constant(s string) error {
	at := uint16(0)
	if n, err := strconv.ParseInt(s, 10, 32); err == nil {
		at = a.add(binary.BigEndian.AppendUint32([]byte{3}, uint32(n)))
	} else if text, err := strconv.Unquote(s); err == nil {
		at = a.entry(8, a.utf8(text))
	} else {
		at = a.class(s)
	}
	a.m.code.WriteByte(19)
	put(&a.m.code, at)
	return nil
}

func (a *assembler) utf8(s string) uint16 {
	return a.add(append(binary.BigEndian.AppendUint16([]byte{1}, uint16(len(s))), s...))
}

func (a *assembler) class(name string) uint16 { return a.entry(7, a.utf8(name)) }

func (a *assembler) entry(tag byte, refs ...uint16) uint16 {
	b := []byte{tag}
	for _, r := range refs {
		b = binary.BigEndian.AppendUint16(b, r)
	}
	return a.add(b)
}

func (a *assembler) add(entry []byte) uint16 {
	if at, ok := a.index[string(entry)]; ok {
		return at
	}
	at := uint16(len(a.index) + 1)
	a.index[string(entry)] = at
	a.pool.Write(entry)
	return at
}

// endMethod resolves the open method's labels and writes it out.
func (a *assembler) endMethod() error {
	m := a.m
	if m == nil {
		return nil
	}
	code := m.code.Bytes()
	for _, j := range m.jumps {
		to, ok := m.labels[j.target]
		if !ok {
			return fmt.Errorf("no label %q", j.target)
		}
		binary.BigEndian.PutUint16(code[j.at+1:], uint16(to-j.at))
	}
	var table bytes.Buffer
	for _, t := range m.tries {
		for _, l := range t {
			to, ok := m.labels[l]
			if !ok {
				return fmt.Errorf("no label %q", l)
			}
			put(&table, uint16(to))
		}
		put(&table, uint16(0))
	}
	put(&a.methods, []uint16{m.flags, m.name, m.descriptor, 1, a.utf8("Code")})
	put(&a.methods, uint32(12+len(code)+table.Len()))
	put(&a.methods, []uint16{m.stack, m.locals})
	put(&a.methods, uint32(len(code)))
	a.methods.Write(code)
	put(&a.methods, uint16(len(m.tries)))
	a.methods.Write(table.Bytes())
	put(&a.methods, uint16(0))
	a.methodCount++
	a.m = nil
	return nil
}

func (a *assembler) file() []byte {
	var b bytes.Buffer
	put(&b, uint32(0xcafebabe))
	put(&b, []uint16{0, 49, uint16(len(a.index) + 1)})
	b.Write(a.pool.Bytes())
	put(&b, []uint16{accPublic | accSuper, a.this, a.super, 0, a.fieldCount})
	b.Write(a.fields.Bytes())
	put(&b, a.methodCount)
	b.Write(a.methods.Bytes())
	put(&b, uint16(0))
	return b.Bytes()
}
