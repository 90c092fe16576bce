package spec

import (
	"strings"
	"testing"
)

func TestOptionsAreChecked(t *testing.T) {
	for want, r := range map[string]Request{
		"absolute":                    {Options: Options{WorkingDir: "data"}},
		`--hostname "a b"`:            {Options: Options{Hostname: "a b"}},
		`--hostname "-x"`:             {Options: Options{Hostname: "-x"}},
		`--dns "router"`:              {Options: Options{DNS: []string{"router"}}},
		`"a\nb" is not one word`:      {Options: Options{DNSSearch: []string{"a\nb"}}},
		`--add-host "a"`:              {Options: Options{Hosts: []string{"a"}}},
		`--add-host "a\nb:10.0.0.1"`:  {Options: Options{Hosts: []string{"a\nb:10.0.0.1"}}},
		"--tmpfs /: ":                 {Options: Options{Tmpfs: []Tmpfs{{Target: "/"}}}},
		`"size=much" is not an`:       {Options: Options{Tmpfs: []Tmpfs{{Target: "/t", Options: []string{"size=much"}}}}},
		"--shm-size -1":               {Options: Options{ShmSize: -1}},
		"--ulimit files: want one of": {Options: Options{Ulimits: []Ulimit{{Name: "files"}}}},
		"--ulimit nofile=9:8":         {Options: Options{Ulimits: []Ulimit{{Name: "nofile", Soft: 9, Hard: 8}}}},
		"--sysctl vm.swappiness is of the whole node": {Options: Options{Sysctls: map[string]string{
			"vm.swappiness": "1"}}},
		"--sysctl net.core.somaxconn would change the host's": {Options: Options{Sysctls: map[string]string{
			"net.core.somaxconn": "1"}}},
		`--sysctl "net/x"`:            {Net: "none", Options: Options{Sysctls: map[string]string{"net/x": "1"}}},
		`"net admin" is not the name`: {Options: Options{CapAdd: []string{"net admin"}}},
		"--device kmsg:":              {Options: Options{Devices: []Device{{Source: "kmsg"}}}},
		`not "rx"`:                    {Options: Options{Devices: []Device{{Source: "/dev/kmsg", Permissions: "rx"}}}},
		"--pull sometimes":            {Options: Options{PullPolicy: "sometimes"}},
		"IPv4 addresses only":         {Ports: []Port{{HostIP: "::1", Host: 80, Container: 80}}},
		"is not an address":           {Ports: []Port{{HostIP: "lan", Host: 80, Container: 80}}},
	} {
		r.Image = "x"
		if err := r.Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", want, err)
		}
	}
	all := Request{Image: "x", Net: "none", Ports: nil, Options: Options{User: "web:1", WorkingDir: "/", Hostname: "n1.example",
		DNS: []string{"10.0.0.1", "fd00::1"}, DNSSearch: []string{"example"}, DNSOptions: []string{"ndots:2"},
		Hosts: []string{"db:10.0.0.2", "six:fd00::2"}, ReadOnly: true,
		Tmpfs:   []Tmpfs{{Target: "/run", Options: []string{"size=64m", "mode=1777", "exec"}}},
		ShmSize: 1, Ulimits: []Ulimit{{"nofile", 1, 2}, {"core", -1, -1}, {"nproc", 1, -1}},
		Sysctls: map[string]string{"net.core.somaxconn": "1", "kernel.msgmax": "1", "fs.mqueue.msg_max": "1"},
		CapAdd:  []string{"net_admin", "CAP_SYS_TIME"}, CapDrop: []string{"ALL"}, Privileged: true,
		Devices: []Device{{"/dev/kmsg", "/dev/log", "r"}, {Source: "/dev/null"}}, NoNewPrivileges: true,
		Init: true, PullPolicy: "always"}}
	if err := all.Validate(); err != nil {
		t.Error(err)
	}
}
