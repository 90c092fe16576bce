package registry

import (
	"net/http"
	"reflect"
	"testing"
)

func TestChallenges(t *testing.T) {
	h := http.Header{"Www-Authenticate": {`Basic realm="a registry"`, `Negotiate`,
		`Bearer realm="https://auth.example/token",service="r\"1\"", Scope="repository:a/b:pull,push" ,x=y`, ``}}
	want := []challenge{
		{"bearer", map[string]string{"realm": "https://auth.example/token", "service": `r"1"`,
			"scope": "repository:a/b:pull,push", "x": "y"}},
		{"basic", map[string]string{"realm": "a registry"}},
		{"negotiate", map[string]string{}},
		{"", map[string]string{}},
	}
	if got := challenges(h); !reflect.DeepEqual(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}
