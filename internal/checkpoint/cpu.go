package checkpoint

import (
	"os"
	"regexp"
	"slices"
	"strings"
)

// depends are the features of a processor that programs choose their code by.
// Those that only the kernel uses, and those that say what is mended, are not.
var depends = regexp.MustCompile(`^(3dnow\w*|abm|adx|aes|amx\w*|avx\w*|bmi[12]|clflush\w*|clwb|cmov|cx16|cx8|erms|f16c|fma4?|fsgsbase|fsrm|fxsr|gfni|hle|lahf_lm|` +
	`mmx\w*|movbe|movdir\w*|ospke|pclmulqdq|pku|popcnt|prefetchw\w*|rdpid|rdrand|rdseed|rdtscp|rtm|serialize|sha_ni|sse\w*|pni|ssse3|tbm|user_shstk|vaes|vpclmulqdq|waitpkg|xop|xsave\w*|xgetbv1)$`)

// CPUFeatures are those of this node, sorted.
func CPUFeatures() []string {
	b, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return nil
	}
	return featuresOf(string(b))
}

// featuresOf are those of the first processor that /proc/cpuinfo names.
func featuresOf(cpuinfo string) []string {
	for line := range strings.Lines(cpuinfo) {
		key, value, _ := strings.Cut(line, ":")
		all := strings.Fields(value)
		switch strings.TrimSpace(key) {
		case "Features": // arm64
		case "flags":
			all = slices.DeleteFunc(all, func(f string) bool { return !depends.MatchString(f) })
		default:
			continue
		}
		slices.Sort(all)
		return slices.Compact(all)
	}
	return nil
}
