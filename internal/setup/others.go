package setup

import (
	"bytes"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"reflect"
	"strings"
)

func nerdctlConfig(old []byte) ([]byte, error) {
	if len(old) == 0 {
		old = []byte(created + "\n")
	}
	return edit(old, []set{{nil, "snapshotter", `"dewpoint"`}}, nil)
}

const k3sDir = "/var/lib/rancher/k3s/agent/etc/containerd/"

// k3sTemplate is the file by which k3s makes containerd's configuration: of version 3 where the one that
// it has made is, or where it has made none yet.
func (c Config) k3sTemplate() string {
	text, err := os.ReadFile(c.Root + k3sDir + "config.toml")
	if err == nil && !bytes.Contains(text, []byte("version = 3")) {
		return k3sDir + "config.toml.tmpl"
	}
	return k3sDir + "config-v3.toml.tmpl"
}

func k3sTemplate(old []byte, socket string) ([]byte, error) {
	if len(old) > 0 {
		return nil, errors.New("there is a template already: put docs/operate/snapshotter.md's lines into it by hand")
	}
	lines := []string{created, `{{ template "base" . }}` + mark}
	for _, l := range append(proxies(version{2, 0, 0}, socket), `[plugins."`+diffs+`"]`,
		`  default = ["dewpoint-diff", "walking"]`) {
		lines = append(lines, l+mark)
	}
	return joinLines(lines), nil
}

func k3sConfig([]byte) ([]byte, error) {
	return joinLines([]string{created, "snapshotter: dewpoint" + mark}), nil
}

// dockerKeys are what daemon.json is to have.
var dockerKeys = map[string]any{"storage-driver": "dewpoint"}

const dockerFeature = "containerd-snapshotter"

func dockerConfig(old []byte) ([]byte, error) {
	doc, err := parseJSON(old)
	if err != nil {
		return nil, err
	}
	for k, v := range dockerKeys {
		doc[k] = v
	}
	features, _ := doc["features"].(map[string]any)
	if features == nil {
		features = map[string]any{}
	}
	features[dockerFeature] = true
	doc["features"] = features
	return writeJSON(doc)
}

func jsonJoined(text []byte) bool {
	doc, err := parseJSON(text)
	return err == nil && doc["storage-driver"] == dockerKeys["storage-driver"]
}

// undoJSON takes back what dockerConfig has set. Where nobody has changed the file since, it gives the
// text that there was before, from the backup.
func undoJSON(text []byte, backup string) (out []byte, gone bool, err error) {
	before, err := os.ReadFile(backup)
	none := errors.Is(err, fs.ErrNotExist)
	if err != nil && !none {
		return nil, false, err
	}
	if written, err := dockerConfig(before); err == nil && bytes.Equal(written, text) {
		return before, none, nil
	}
	doc, err := parseJSON(text)
	if err != nil {
		return nil, false, err
	}
	old, err := parseJSON(before)
	if err != nil {
		return nil, false, err
	}
	restore(doc, old, "storage-driver")
	features, _ := doc["features"].(map[string]any)
	was, _ := old["features"].(map[string]any)
	if features == nil {
		features = map[string]any{}
	}
	if restore(features, was, dockerFeature); len(features) > 0 || was != nil {
		doc["features"] = features
	} else {
		delete(doc, "features")
	}
	if len(doc) == 0 && none {
		return nil, true, nil
	}
	if reflect.DeepEqual(doc, old) && !none {
		return before, false, nil
	}
	out, err = writeJSON(doc)
	return out, false, err
}

func restore(doc, old map[string]any, key string) {
	if v, ok := old[key]; ok {
		doc[key] = v
	} else {
		delete(doc, key)
	}
}

func parseJSON(text []byte) (map[string]any, error) {
	doc := map[string]any{}
	if strings.TrimSpace(string(text)) == "" {
		return doc, nil
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	err := d.Decode(&doc)
	if doc == nil { // null
		doc = map[string]any{}
	}
	return doc, err
}

func writeJSON(doc map[string]any) ([]byte, error) {
	b, err := json.MarshalIndent(doc, "", "  ")
	return append(b, '\n'), err
}
