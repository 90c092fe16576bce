package upper

// SetMaxSpans sets the bound of sparse files' maps, and returns what sets it back.
func SetMaxSpans(n int) (back func()) {
	was := maxSpans
	maxSpans = n
	return func() { maxSpans = was }
}
