package test

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"dewpoint/testkit"
	"dewpoint/testkit/registrytest"
)

// python runs a script with the client of examples/python, and returns what it prints.
func python(t *testing.T, meanwhile func(), script string, args ...string) string {
	t.Helper()
	cmd := exec.Command("python3", append([]string{"-B", script}, args...)...)
	cmd.Env = append(os.Environ(), "PYTHONPATH=../examples/python")
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	timer := time.AfterFunc(3*time.Minute, func() { cmd.Process.Kill() })
	defer timer.Stop()
	wait := sync.OnceValue(cmd.Wait)
	defer func() { // also when meanwhile has ended the test
		if t.Failed() {
			cmd.Process.Kill()
			t.Logf("%s: %v\n%s%s", script, wait(), out.String(), errs.String())
		}
	}()
	if meanwhile != nil {
		meanwhile()
	}
	if err := wait(); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

// certificate makes a certificate that signs itself and is one of 127.0.0.1.
func certificate(t *testing.T, dir, name string) (cert, key string) {
	t.Helper()
	cert, key = filepath.Join(dir, name+".crt"), filepath.Join(dir, name+".key")
	out, err := exec.Command("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
		"-nodes", "-days", "2",
		"-subj", "/CN="+name, "-addext", "subjectAltName=IP:127.0.0.1", "-out", cert, "-keyout",
		key).CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return cert, key
}

// A program in Python deploys once however often it asks, follows stages, output and events over
// a crash of dewd, cancels, removes, and is known by a token or a certificate over TLS.
func TestPython(t *testing.T) {
	reg := registrytest.New(t)
	img := reg.PushImage("app:1", appLayers(t, 0), appOptions())
	m := newMachine(t, reg)
	address := testkit.FreeAddress(t)
	dir := filepath.Dir(m.root)
	cert, key := certificate(t, dir, "node")
	mine, minekey := certificate(t, dir, "reader")
	tokens := filepath.Join(dir, "tokens")
	m.config += fmt.Sprintf("[api]\nlisten = %q\ncert = %q\nkey = %q\nclient_ca = %q\ntokens = %q\n[api.clients]\nreader = \"read\"\n", address, cert, key, mine, tokens)
	m.start()
	out := python(t, func() {
		await(t, filepath.Join(dir, "following"))
		m.kill()
		m.start()
		m.must("run", "-d", "--net", "none", "--name", "later", img.Ref, "sleep", "1h")
		m.must("rm", "-f", "later")
		if err := os.WriteFile(filepath.Join(dir, "restarted"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}, "testdata/drive.py", "unix://"+m.state+"/dewd.sock", dir, img.Ref)
	want := []string{"stages resolved mounted created started ready", "same True 1", "other key_reused",
		"list ['py']", "logs above",
		"removed not_found 4", "canceled", "resync 1 2", "events True ['removed']"}
	if got := strings.Split(strings.TrimSpace(out), "\n"); !slices.Equal(got, want) {
		t.Errorf("python prints\n%q, want\n%q", got, want)
	}

	token := filepath.Join(dir, "token")
	if err := os.WriteFile(token, []byte(m.must("token", "--file", tokens, "--name", "r", "read")),
		0o600); err != nil {
		t.Fatal(err)
	}
	for _, cred := range [][]string{{"token=" + token}, {"cert=" + mine, "key=" + minekey}} {
		out := python(t, nil, "testdata/drive.py",
			append([]string{"https://" + address, dir, img.Ref, "ca=" + cert}, cred...)...)
		if out != "version n1\nrefused permission\nrefused permission\n" {
			t.Errorf("with %s python prints %q", cred[0], out)
		}
	}

	out = python(t, nil, "../examples/python/example.py", "--host", "unix://"+m.state+"/dewd.sock", "--follow",
		img.Ref, "cat", "/etc/motd")
	for _, line := range []string{"example-1: ready after ", "example-2: ready after ",
		"example-1 stdout: above", "example-2 stdout: above"} {
		if !strings.Contains(out, line) {
			t.Errorf("the example says no %q in %q", line, out)
		}
	}
	if left := strings.TrimSpace(m.must("--json", "ps", "-a")); left != "[]" {
		t.Errorf("the example leaves %s", left)
	}
}
