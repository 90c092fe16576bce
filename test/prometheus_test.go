package test

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// The alerts fire when they should, and each metric that they and the dashboard read is one that dewd serves.
func TestPrometheusFiles(t *testing.T) {
	t.Parallel()
	const dir = "../dist/prometheus/"
	promtool := func(args ...string) {
		t.Helper()
		if out, err := exec.CommandContext(t.Context(), "promtool", args...).CombinedOutput(); err != nil {
			t.Errorf("promtool %s: %v\n%s", args, err, out)
		}
	}
	promtool("check", "rules", dir+"alerts.yml")
	promtool("test", "rules", dir+"alerts_test.yml")

	alerts, err := os.ReadFile(dir + "alerts.yml")
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(dir + "dashboard.json")
	if err != nil {
		t.Fatal(err)
	}
	var board struct {
		Panels []struct{ Targets []struct{ Expr string } }
	}
	if err := json.Unmarshal(b, &board); err != nil {
		t.Fatal(err)
	}
	var exprs []string
	for _, p := range board.Panels {
		for _, target := range p.Targets {
			exprs = append(exprs, strings.ReplaceAll(target.Expr, "$__rate_interval", "5m"))
		}
	}
	if len(exprs) < 10 {
		t.Errorf("the dashboard has %d queries", len(exprs))
	}
	rules := map[string]any{"groups": []any{map[string]any{"name": "dashboard", "rules": recorded(exprs)}}}
	text, err := json.Marshal(rules) // which is YAML, too
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "rules.yml")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	promtool("check", "rules", file)

	docs, err := os.ReadFile("../docs/operate/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	suffix := regexp.MustCompile("_(bucket|count|sum)$")
	for _, name := range regexp.MustCompile(`dewpoint_[a-z_]+`).FindAllString(string(alerts)+strings.Join(exprs, " "), -1) {
		if !strings.Contains(string(docs), "`"+suffix.ReplaceAllString(name, "")+"`") &&
			!strings.Contains(string(docs), "`"+name+"`") {
			t.Errorf("nothing serves %s", name)
		}
	}
}

// recorded are rules that record what the queries give: promtool checks those.
func recorded(exprs []string) (rules []any) {
	for _, e := range exprs {
		rules = append(rules, map[string]any{"record": "dashboard", "expr": e})
	}
	return rules
}
