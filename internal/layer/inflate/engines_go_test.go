//go:build !cgo || !isal

package inflate

var engines = map[string]func() engine{
	"go": func() engine { return newDecoder() },
}
