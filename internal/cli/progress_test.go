package cli

import (
	"bytes"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"dewpoint/internal/spec"
)

// Off a terminal a wait for readiness is told every few seconds, also when nothing had to be fetched.
func TestWaitingIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		c := &call{cfg: Config{Stderr: &out}}
		p := c.progress("nginx:1")
		for _, s := range []string{spec.Resolved, spec.Mounted, spec.Created, spec.Started} {
			p.reached("web", s, 0.1)
		}
		time.Sleep(12 * time.Second)
		p.reached("web", spec.Ready, 12)
		time.Sleep(10 * time.Second)
		p.silence()
		p.reached("web", spec.Complete, 30)
		time.Sleep(time.Minute)
		const want = "nginx:1: started, not ready yet, 5 s\nnginx:1: started, not ready yet, 10 s\n"
		if got := out.String(); got != want {
			t.Errorf("%q, want %q", strings.TrimSpace(got), want)
		}
	})
}
