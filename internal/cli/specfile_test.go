package cli

import "testing"

// FuzzSpecs reads a file of instructions.
func FuzzSpecs(f *testing.F) {
	f.Add([]byte("image: nginx:1\nname: a\nenv: [A=b]\nports:\n- {container: 80, host: 8080}\n"))
	f.Add([]byte(`[{"image":"a","cpus":1.5},{"image":"b"}]`))
	f.Add([]byte("image: a\n---\n- image: b\n- image: &x c\n  name: *x\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		all, err := parseSpecs("file", b)
		if err == nil && len(all) == 0 {
			t.Fatal("neither instructions nor an error")
		}
		for _, r := range all {
			if err := r.Validate(); err != nil {
				t.Fatal(err)
			}
		}
	})
}
