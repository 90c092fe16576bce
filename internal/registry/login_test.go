package registry

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"dewpoint/testkit/registrytest"
)

// helpedBy has a credential helper, a shell script, keep the login of a host, and gives Docker's file.
func helpedBy(t *testing.T, host, script string) (file string) {
	t.Helper()
	bin := t.TempDir()
	chmod(t, write(t, filepath.Join(bin, "docker-credential-dewtest"), "#!/bin/sh\n"+script+"\n"))
	t.Setenv("PATH", bin+":/usr/bin:/bin")
	return write(t, filepath.Join(t.TempDir(), "config.json"), fmt.Sprintf(`{"credHelpers":{%q:"dewtest"}}`, host))
}

const answers = `read host; echo "{\"ServerURL\":\"$host\",\"Username\":\"%s\",\"Secret\":\"%s\"}"`

func TestCredentialHelper(t *testing.T) {
	for name, tc := range map[string]struct {
		auth   registrytest.Auth
		script string
	}{
		"password": {registrytest.Auth{Mode: registrytest.Basic, User: "u", Password: "p"},
			fmt.Sprintf(answers, "u", "p")},
		"identity token": {registrytest.Auth{Mode: registrytest.Bearer, Identity: "refresh-me"},
			fmt.Sprintf(answers, identity, "refresh-me")},
		"none": {registrytest.Auth{Mode: registrytest.Bearer, Anonymous: true},
			`echo "credentials not found in native keychain"; exit 1`},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t, 1000)
			b.reg.Require(tc.auth)
			c := client(t, Config{DockerConfig: helpedBy(t, b.reg.Host(), tc.script)}, b.reg)
			if _, _, err := b.read(t, c, 0, -1); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// A helper that hangs is one process, however many wait for it. It is killed in time, with what it has
// started, and pulls from another registry do not notice.
func TestHelperHangs(t *testing.T) {
	b := newBed(t, 1000)
	b.reg.Require(registrytest.Auth{Mode: registrytest.Basic, User: "u", Password: "p"})
	pids := filepath.Join(t.TempDir(), "pids")
	file := helpedBy(t, b.reg.Host(), "echo $$ >> "+pids+"; sleep 1000; echo no")
	c := client(t, Config{DockerConfig: file}, b.reg)
	c.helperTime = time.Second
	var waiting sync.WaitGroup
	for range 10 {
		waiting.Go(func() {
			_, err := c.Resolve(t.Context(), parse(t, b.reg.Host()+"/a:1"), ResolveOptions{})
			if err == nil || !strings.Contains(err.Error(), "docker-credential-dewtest") {
				t.Errorf("%v", err)
			}
		})
	}
	other := registrytest.New(t)
	p := other.PushImage("a:1", someLayers, registrytest.Options{})
	if _, err := client(t, Config{DockerConfig: file}, other).Resolve(t.Context(), parse(t, p.Ref),
		ResolveOptions{}); err != nil {
		t.Error(err)
	}
	waiting.Wait()
	text, err := os.ReadFile(pids)
	if err != nil {
		t.Fatal(err)
	}
	if n := len(strings.Fields(string(text))); n == 0 || n > 2 { // who came late finds the next one
		t.Errorf("%d helpers ran", n)
	}
	for _, pid := range strings.Fields(string(text)) {
		if _, err := os.Stat("/proc/" + pid); err == nil {
			t.Errorf("helper %s still runs", pid)
		}
	}
}
