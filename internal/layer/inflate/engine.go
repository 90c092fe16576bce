package inflate

// windowSize is how far back a deflate match may reach.
const windowSize = 32 << 10

// minOut is the least output space that an engine accepts.
const minOut = 4 << 10

// status says why an engine returned.
type status int

const (
	needInput status = iota // all of in is used, save a rest too short to decode
	outFull                 // less than minOut bytes of out are free
	atBlock                 // a block that is not the last one has ended
	atEnd                   // the last block has ended
)

// engine decodes one raw deflate stream after the other. It is not safe for
// concurrent use.
type engine interface {
	// reset begins a stream, or goes on at a block's start: window is the
	// output before it, bits holds the n bits (0 to 7) of the byte before the
	// next input that are not used yet.
	reset(window []byte, bits, n uint8)
	// inflate decodes in to out, which has room for at least minOut bytes.
	// It uses nIn bytes of in and makes nOut bytes of output. nIn may be as low
	// as -keepBack where an earlier call took more than it needed. With stop it
	// returns atBlock at the next block's end, else it may do so or not. Bytes
	// of out behind nOut may be overwritten. Errors wrap ErrCorrupt.
	inflate(in, out []byte, stop bool) (nIn, nOut int, st status, err error)
	// held is the number of bits (0 to 7) of the last consumed byte that are
	// not used yet. It holds after atBlock.
	held() uint8
	// window returns a copy of the last output, up to windowSize bytes of it.
	// It holds after atBlock.
	window() []byte
	close()
}
