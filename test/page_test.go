package test

import (
	"fmt"
	"net"
	"testing"

	"dewpoint/internal/registry/registrytest"
	"dewpoint/internal/web/webtest"
)

// A person sees a deployment on the node's page while it goes on and when it serves.
func TestPage(t *testing.T) {
	reg := registrytest.New(t)
	img := reg.PushImage("app:1", appLayers(t, 1<<20), appOptions())
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	m := newMachine(t, reg)
	m.args = append(m.args, "--http", l.Addr().String())
	m.start()
	page := webtest.Open(t, "http://"+l.Addr().String())
	webtest.Sees(t, page, "header", "Dewpoint", "containerd", "live")
	rec := m.record("run", "-d", "--name", "web", img.Ref, "sleep", "1h")
	webtest.Sees(t, page, "#deployment-table tbody tr:not(.running)", "web", img.Ref, rec.Way.Pull+", "+rec.Way.Start, fmt.Sprintf("%.2f s", rec.Stages["ready"]))
	webtest.Sees(t, page, "#container-table", "web", "running")
	m.must("rm", "-f", "web")
	webtest.Sees(t, page, "#no-containers", "None.")
}
