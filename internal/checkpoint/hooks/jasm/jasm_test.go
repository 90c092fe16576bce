package jasm

import "testing"

func TestAssemblerSaysWhatIsWrong(t *testing.T) {
	for _, source := range []string{
		"return", "class A B\nmethod f ()V 1 1\njump", "class A B\nmethod f ()V 1 1\ngoto x", "class A B\nmethod f",
		"class A B\nmethod f ()V 1 1\ngetstatic x", "class A B\nmethod f ()V 1 1\naload y",
	} {
		if _, err := Assemble(source); err == nil {
			t.Errorf("%q was assembled", source)
		}
	}
}
