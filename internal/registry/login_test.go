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

// A login is checked, kept where Docker keeps it, and pulled with; what else is in the file stays.
func TestLogin(t *testing.T) {
	const user, password, token = "dew", "point:s3cret", "refresh-me"
	for name, tc := range map[string]struct {
		auth     registrytest.Auth
		password string
		kept     string // in Docker's file, "" for a login that is refused
	}{
		"basic":          {registrytest.Auth{Mode: registrytest.Basic}, password, `"auth": "ZGV3OnBvaW50OnMzY3JldA=="`},
		"basic, wrong":   {registrytest.Auth{Mode: registrytest.Basic}, "wrong", ""},
		"bearer":         {registrytest.Auth{Mode: registrytest.Bearer}, password, `"auth": "ZGV3OnBvaW50OnMzY3JldA=="`},
		"bearer, wrong":  {registrytest.Auth{Mode: registrytest.Bearer}, "wrong", ""},
		"identity token": {registrytest.Auth{Mode: registrytest.Bearer, Identity: token}, password, token},
	} {
		t.Run(name, func(t *testing.T) {
			reg := registrytest.New(t)
			p := reg.PushImage("a/b:1", someLayers, registrytest.Options{})
			tc.auth.User, tc.auth.Password = user, password
			reg.Require(tc.auth)
			const before = `{"auths":{"other":{"auth":"bzpw"}},"credHelpers":{"third":"x"}}`
			file := write(t, filepath.Join(t.TempDir(), "config.json"), before)
			c := client(t, Config{DockerConfig: file}, reg)
			err := c.Login(t.Context(), reg.Host(), user, tc.password)
			text, readErr := os.ReadFile(file)
			if readErr != nil {
				t.Fatal(readErr)
			}
			if tc.kept == "" {
				wantKind(t, err, Unauthorized, "the user or the password is wrong")
				if string(text) != before {
					t.Errorf("the file is %s", text)
				}
				return
			}
			for _, part := range []string{tc.kept, `"other"`, `"third": "x"`} {
				if err != nil || !strings.Contains(string(text), part) {
					t.Errorf("%v, no %s in %s", err, part, text)
				}
			}
			if tc.kept == token && strings.Contains(string(text), "ZGV3OnBv") {
				t.Errorf("the password is kept beside the token: %s", text)
			}
			if _, err := c.Resolve(t.Context(), parse(t, p.Ref), ResolveOptions{}); err != nil {
				t.Error(err)
			}
			if err := c.Logout(reg.Host()); err != nil {
				t.Error(err)
			}
			if text, _ := os.ReadFile(file); strings.Contains(string(text), reg.Host()) ||
				!strings.Contains(string(text), `"other"`) {
				t.Errorf("after the logout it is %s", text)
			}
		})
	}
}

// A credential helper that Docker's file names keeps the login: an identity token as one.
func TestLoginByHelper(t *testing.T) {
	for identity, want := range map[string]string{"": `"Username":"dew","Secret":"p4ss"`,
		"refresh-me": `"Username":"\u003ctoken\u003e","Secret":"refresh-me"`} {
		reg := registrytest.New(t)
		reg.Require(registrytest.Auth{Mode: registrytest.Bearer, User: "dew", Password: "p4ss", Identity: identity})
		kept := filepath.Join(t.TempDir(), "kept")
		file := helpedBy(t, reg.Host(), "echo $1 $(cat) >>"+kept)
		c := client(t, Config{DockerConfig: file}, reg)
		if err := c.Login(t.Context(), reg.Host(), "dew", "p4ss"); err != nil {
			t.Fatal(err)
		}
		if err := c.Logout(reg.Host()); err != nil {
			t.Fatal(err)
		}
		got, _ := os.ReadFile(kept)
		for _, part := range []string{"store {", want, "erase " + reg.Host()} {
			if !strings.Contains(string(got), part) {
				t.Errorf("no %s in %q", part, got)
			}
		}
		if text, _ := os.ReadFile(file); strings.Contains(string(text), "p4ss") {
			t.Errorf("the password is in the file: %s", text)
		}
	}
}
