package shimgroup

import "testing"

func TestSocketIn(t *testing.T) {
	for name, said := range map[string]string{
		"containerd 1.6": "unix:///run/containerd/s/0af3",
		"JSON":           `{"version":2,"address":"unix:///run/containerd/s/0af3","protocol":"ttrpc"}`,
		"protobuf":       "\x08\x03\x12\x1dunix:///run/containerd/s/0af3\x1a\x05ttrpc",
	} {
		if got := socketIn([]byte(said)); got != "/run/containerd/s/0af3" {
			t.Errorf("%s: %q", name, got)
		}
	}
	for _, said := range []string{"", "unix:/", "nothing"} {
		if got := socketIn([]byte(said)); got != "" {
			t.Errorf("%q: %q", said, got)
		}
	}
}
