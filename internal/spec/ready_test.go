package spec

import "testing"

func TestParseReadyCheck(t *testing.T) {
	for how, want := range map[string]string{
		"": "none", "none": "none", "tcp:80": "tcp:80", "http:8080": "http:8080/",
		"http:80/a/b?c=d":     "http:80/a/b?c=d",
		`cmd:["/bin/x","-y"]`: `cmd:["/bin/x","-y"]`, "cmd:pg_isready -q": `cmd:["/bin/sh","-c","pg_isready -q"]`,
		"log:ready: [0-9]+": "log:ready: [0-9]+",
	} {
		c, err := ParseReadyCheck(how, nil)
		if err != nil || c.String() != want {
			t.Errorf("%q gives %s, %v; want %s", how, c, err, want)
		}
	}
	for _, how := range []string{"tcp", "tcp:0", "tcp:65536", "tcp:80/x", "http:/x", "udp:53", "cmd:", "cmd:[]",
		`cmd:["a"`, "log:", "log:(", "none:x"} {
		if err := (Request{Image: "x", Ready: how}).Validate(); err == nil {
			t.Errorf("%q is taken", how)
		}
	}
}

func FuzzParseReadyCheck(f *testing.F) {
	for _, s := range []string{"tcp:80", "http:80/x", "cmd:[\"a\"]", "log:a+", "none", ":"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		c, err := ParseReadyCheck(s, nil)
		if err != nil {
			return
		}
		again, err := ParseReadyCheck(c.String(), nil)
		if err != nil || again.String() != c.String() {
			t.Errorf("%q reads as %s, which reads as %s, %v", s, c, again, err)
		}
	})
}
