package checkpoint

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// What a program chooses its code by is seen to be masked; what only the kernel uses is not told.
func TestFeaturesOf(t *testing.T) {
	const some = "processor\t: 0\nvendor_id\t: GenuineIntel\nflags\t\t: fpu vme mca vmx avx512f sse4_2 avx2 popcnt aes xsaveopt ibrs avx2 md_clear\nbugs\t\t: spectre_v1\n\nprocessor\t: 1\nflags\t\t: none\n"
	want := []string{"aes", "avx2", "avx512f", "popcnt", "sse4_2", "xsaveopt"}
	if got := featuresOf(some); !slices.Equal(got, want) {
		t.Errorf("%q, not %q", got, want)
	}
	arm := "processor\t: 0\nFeatures\t: fp asimd sve2 aes\nCPU part\t: 0xd49\n"
	if got := featuresOf(arm); !slices.Equal(got, []string{"aes", "asimd", "fp", "sve2"}) {
		t.Errorf("of an arm64 %q", got)
	}
	here, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		t.Fatal(err)
	}
	all := featuresOf(string(here))
	if len(all) < 5 {
		t.Fatalf("this machine has %q", all)
	}
	for _, f := range all { // of this machine's, masked one by one
		masked := regexp.MustCompile(`(?m)^((?:flags|Features)\s*:.*?)\s`+regexp.QuoteMeta(f)+
			`(\s|$)`).ReplaceAllString(string(here), "$1$2")
		left := featuresOf(masked)
		if len(left) != len(all)-1 || slices.Contains(left, f) {
			t.Errorf("without %s there are %s of %s", f, strings.Join(left, " "), strings.Join(all, " "))
		}
	}
}
