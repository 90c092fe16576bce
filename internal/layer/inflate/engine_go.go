//go:build !cgo || !isal

package inflate

func newEngine() engine { return newDecoder() }

func engineName() string { return "go" }
