package cli

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"dewpoint/testkit/registrytest"
)

// A login needs no daemon, goes where dewd's configuration says, and stays where Docker keeps it.
func TestLogin(t *testing.T) {
	reg := registrytest.New(t)
	reg.Require(registrytest.Auth{Mode: registrytest.Basic, User: "dew", Password: "p4ss word"})
	dir := t.TempDir()
	t.Setenv("DOCKER_CONFIG", dir)
	t.Setenv(HostVariable, "unix:///nowhere")
	file := filepath.Join(dir, "dewd.toml")
	if err := os.WriteFile(file, fmt.Appendf(nil, "[registry.%q]\nplain_http = true\n", reg.Host()), 0o600); err != nil {
		t.Fatal(err)
	}
	dew := func(stdin string, args ...string) (int, string) {
		t.Helper()
		in := filepath.Join(t.TempDir(), "in")
		if err := os.WriteFile(in, []byte(stdin), 0o600); err != nil {
			t.Fatal(err)
		}
		f, err := os.Open(in)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		var said output
		code := Main(t.Context(), args, Config{Version: "v0", Stdin: f, Stdout: io.Discard, Stderr: &said})
		return code, said.text()
	}
	kept := func() string {
		text, _ := os.ReadFile(filepath.Join(dir, "config.json"))
		return string(text)
	}
	for _, bad := range []struct {
		stdin string
		args  []string
		code  int
		says  string
	}{
		{"", []string{"-u", "dew", reg.Host()}, 2, "--password-stdin"},
		{"x", []string{"--password-stdin", reg.Host()}, 2, "-u NAME"},
		{"", []string{"-u", "dew", "--password-stdin", reg.Host()}, 1, "read the password"},
		{"wrong\n", []string{"-u", "dew", "--password-stdin", reg.Host()}, 5, "the user or the password is wrong"},
	} {
		code, said := dew(bad.stdin, append([]string{"login", "--config", file}, bad.args...)...)
		if code != bad.code || !strings.Contains(said, bad.says) || kept() != "" {
			t.Errorf("%v: exit code %d, %s, kept %s", bad.args, code, said, kept())
		}
	}
	if code, said := dew("p4ss word\n", "login", "--config", file, "-u", "dew", "--password-stdin",
		"http://"+reg.Host()+"/"); code != 0 || !strings.Contains(kept(), "ZGV3OnA0c3Mgd29yZA==") {
		t.Errorf("exit code %d, %s, kept %s", code, said, kept())
	}
	if code, said := dew("", "logout", "--config", file, reg.Host()); code != 0 || strings.Contains(kept(), reg.Host()) {
		t.Errorf("exit code %d, %s, kept %s", code, said, kept())
	}
}
