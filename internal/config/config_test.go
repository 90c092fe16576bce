package config

import (
	"os"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"time"
)

// Tests and the laboratory may set what dewd chooses by itself.
func TestMain(m *testing.M) {
	os.Setenv(tuningVar, "1")
	os.Exit(m.Run())
}

func TestParse(t *testing.T) {
	c, err := Parse([]byte(`
[registry."10.77.255.1:5000"]
plain_http = true
[registries]
stall_timeout = "5s"
[cache]
max_bytes = "10GB"
[limits]
memory = "64MiB"
[link]
limit = "20Mbit"
[node]
name = "n1"
mount = "loop"
`))
	if err != nil {
		t.Fatal(err)
	}
	if !c.Registry["10.77.255.1:5000"].PlainHTTP || c.Cache.MaxBytes != 10e9 || c.Limits.Memory != 64<<20 ||
		c.Link.Limit != 2_500_000 || time.Duration(c.Registries.StallTimeout) != 5*time.Second ||
		c.Node.Mount != "loop" {
		t.Fatalf("read as %+v", c)
	}
}

func TestWhatIsWrongIsNamed(t *testing.T) {
	for text, want := range map[string]string{
		"[cache]\nmax_byte = \"1GB\"":                         "line 2: no such key: cache.max_byte",
		"[cache]\nmax_bytes = \"many\"":                       "is not a size",
		"[link]\nlimit = \"20\"":                              "is not a rate",
		"[node]\nmount = \"btrfs\"":                           "erofs, loop or tree",
		"[registry.\"http://h\"]\nplain_http=true":            "give the host",
		"[registries]\nstall_timeout = \"-3s\"":               "at least 1s",
		"[limits]\nmemory = \"1KiB\"":                         "at least 16MiB",
		"[engine]\nnamespace = \"a/b\"":                       "engine.namespace",
		"[engine]\nsubnet = \"10.0.0.0/30\"":                  "/28 or larger",
		"[engine]\nruntime = \"kata\"":                        "auto, crun or runc",
		"[checkpoint]\nmode = \"auto\"":                       "asked, measured, manual or off",
		"[lazy]\nmode = \"off\"":                              "auto, never or on-demand",
		"[checkpoint]\nengine = \"docker\"":                   "auto, criu or dmtcp",
		"[checkpoint]\ndmtcp = \"/nope\"":                     "checkpoint.dmtcp",
		"[node":                                               "line 1",
		"[pop]\nnode = \"a/b\"":                               "pop.node",
		"[pop]\nnode = \"a:b\\n\"":                            "pop.node",
		"[pop]\nnode = \"..\"":                                "pop.node",
		"[pop]\nstore = \"mnt/pop\"":                          "an absolute path",
		"[pop]\nlisten = \":7070\"":                           "pop.redis is missing",
		"[pop]\nredis = \"x\"\nlisten = \":70\"":              "pop.key is missing",
		"[pop]\nredis = \"x\"\nkey = \"/\"\nlisten = \":70\"": "the other nodes reach",
		"[pop]\nlow = 0.97":                                   "low below high",
		"[pop]\nhigh = 1.5":                                   "low below high",
		"[pop]\nhigh = 0.03":                                  "low below high",
		"[pop]\nlease = 5":                                    "pop.lease = \"5ns\": at least 1s",
		"[pop]\nlease = \"2m\"":                               "is not longer than pop.lease",
		"[pop]\ngrace = \"-1s\"":                              "at least 1s",
		"[pop]\ngrace = \"5s\"":                               "is not longer than pop.lease",
		"[pop]\npatience = \"1us\"":                           "at least 100ms",
	} {
		if _, err := Parse([]byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q in it", text, err, want)
		}
	}
}

func TestParseSize(t *testing.T) {
	for s, want := range map[string]int64{"0": 0, "64m": 64 << 20, "1.5GiB": 3 << 29, "10 GB": 10e9, "7b": 7} {
		if n, err := ParseSize(s); err != nil || n != want {
			t.Errorf("ParseSize(%q) = %d, %v; want %d", s, n, err, want)
		}
	}
	for _, s := range []string{"", "-1", "1xb", "1e40TB", "GB"} {
		if n, err := ParseSize(s); err == nil {
			t.Errorf("ParseSize(%q) = %d, want an error", s, n)
		}
	}
}

// operatorKeys are the keys of the file that are not for tests alone.
func operatorKeys(v reflect.Type, prefix string) (keys []string) {
	for f := range v.Fields() {
		name := prefix + f.Tag.Get("toml")
		switch {
		case f.Type.Kind() == reflect.Struct:
			keys = append(keys, operatorKeys(f.Type, name+".")...)
		case f.Type == reflect.TypeFor[map[string]Registry]():
			keys = append(keys, operatorKeys(f.Type.Elem(), name+".HOST.")...)
		case f.Tag.Get("tuning") == "":
			keys = append(keys, name)
		}
	}
	return keys
}

// An operator can reason about 35 keys. The others are for tests alone.
func TestKeysForOperators(t *testing.T) {
	if keys := operatorKeys(reflect.TypeFor[Config](), ""); len(keys) > 35 {
		t.Errorf("%d keys for operators, more than 35: %q", len(keys), keys)
	}
	t.Setenv(tuningVar, "")
	for _, text := range []string{"[pop]\nlease = \"15s\"", "[deploy]\nmax = 2", "[trace]\nendpoint = \"http://h:1\""} {
		if _, err := Parse([]byte(text)); err == nil || !strings.Contains(err.Error(), "not a key for operators") {
			t.Errorf("%q: %v", text, err)
		}
	}
	if _, err := Parse([]byte("[pop]\nstore = \"/mnt/pop\"\n[lazy]\nmode = \"never\"")); err != nil {
		t.Error(err)
	}
}

// docs/operate/configuration.md shows every key of operators, in a file that dewd takes.
func TestKeysAreDocumented(t *testing.T) {
	t.Setenv(tuningVar, "")
	b, err := os.ReadFile("../../docs/operate/configuration.md")
	if err != nil {
		t.Fatal(err)
	}
	_, file, _ := strings.Cut(string(b), "```toml\n")
	file, _, _ = strings.Cut(file, "```")
	if _, err := Parse([]byte(regexp.MustCompile(`"/etc/[^"]*"`).ReplaceAllString(file, `"/"`))); err != nil {
		t.Error(err)
	}
	shown, section := map[string]bool{}, ""
	for line := range strings.Lines(file) {
		if name, ok := strings.CutPrefix(line, "["); ok {
			section, _, _ = strings.Cut(name, "]")
			if strings.HasPrefix(section, "registry.") {
				section = "registry.HOST"
			}
		} else if key, _, ok := strings.Cut(strings.TrimPrefix(line, "# "), " = "); ok {
			shown[section+"."+key] = true
		}
	}
	for _, key := range operatorKeys(reflect.TypeFor[Config](), "") {
		if !shown[key] {
			t.Errorf("docs/operate/configuration.md does not show %s", key)
		}
	}
}
