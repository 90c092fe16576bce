//go:build cgo && isal

package inflate

/*
#cgo LDFLAGS: -lisal
#include <stdlib.h>
#include <string.h>
#include <isa-l/igzip_lib.h>
#include <isa-l.h>

// ISA-L does not stop at blocks, but it stops at the end of the last one. So
// where a stop is wanted and a block has begun, its last-block flag is set and
// the true one kept in last; at the block's end the decoder is given a new
// header to read and the history, which it drops at a stream's end.
//
// ISA-L 2.30 on arm64 may also take the end of a block that is not the last
// for the end of the stream, when the output is full there. The flag that it
// read from the header tells, and it is treated like a forced stop.
typedef struct {
	struct inflate_state s;
	int forced;   // s.bfinal is set by us, last is the true one
	uint32_t last;
	uint32_t nhist;
	uint8_t hist[ISAL_DEF_HIST_SIZE]; // the last output
} dew_inflate;

enum { DEW_INPUT, DEW_OUTPUT, DEW_BLOCK, DEW_END };

typedef struct {
	int64_t in, out;
	int status, error;
} dew_result;

static void dew_remember(dew_inflate *d, const uint8_t *p, size_t n) {
	if (n >= ISAL_DEF_HIST_SIZE) {
		memcpy(d->hist, p + n - ISAL_DEF_HIST_SIZE, ISAL_DEF_HIST_SIZE);
		d->nhist = ISAL_DEF_HIST_SIZE;
		return;
	}
	if (d->nhist + n > ISAL_DEF_HIST_SIZE) {
		size_t over = d->nhist + n - ISAL_DEF_HIST_SIZE;
		memmove(d->hist, d->hist + over, d->nhist - over);
		d->nhist -= over;
	}
	memcpy(d->hist + d->nhist, p, n);
	d->nhist += n;
}

static void dew_reset(dew_inflate *d, const uint8_t *dict, size_t n, uint64_t bits, int nbits) {
	isal_inflate_reset(&d->s);
	d->s.crc_flag = ISAL_DEFLATE;
	d->forced = 0;
	d->nhist = 0;
	if (n > 0) {
		dew_remember(d, dict, n);
		isal_inflate_set_dict(&d->s, d->hist, d->nhist);
	}
	d->s.read_in = bits;
	d->s.read_in_length = nbits;
}

static int dew_in_block(dew_inflate *d) {
	return d->s.block_state == ISAL_BLOCK_TYPE0 || d->s.block_state == ISAL_BLOCK_CODED;
}

// dew_unread gives whole bytes of the bit buffer back to the input.
static void dew_unread(dew_inflate *d) {
	int k = d->s.read_in_length / 8;
	d->s.next_in -= k;
	d->s.avail_in += k;
	d->s.read_in_length -= 8 * k;
	d->s.read_in &= (1u << d->s.read_in_length) - 1;
}

// dew_stopped sorts out the end that ISA-L saw: that of the stream or of a block.
static int dew_stopped(dew_inflate *d) {
	uint32_t last = d->forced ? d->last : d->s.bfinal;
	dew_unread(d);
	if (last)
		return DEW_END;
	uint64_t bits = d->s.read_in;
	int n = d->s.read_in_length;
	uint8_t *next_in = d->s.next_in;
	uint32_t avail_in = d->s.avail_in;
	isal_inflate_reset(&d->s);
	d->s.next_in = next_in;
	d->s.avail_in = avail_in;
	d->s.read_in = bits;
	d->s.read_in_length = n;
	isal_inflate_set_dict(&d->s, d->hist, d->nhist);
	d->forced = 0;
	return DEW_BLOCK;
}

static dew_result dew_run(dew_inflate *d, uint8_t *in, size_t nin, uint8_t *out, size_t nout, int stop) {
	dew_result r = {0};
	if (stop && !d->forced && dew_in_block(d)) {
		d->forced = 1;
		d->last = d->s.bfinal;
		d->s.bfinal = 1;
	}
	d->s.next_in = in;
	d->s.avail_in = nin;
	d->s.next_out = out;
	d->s.avail_out = nout;
	r.error = isal_inflate(&d->s);
	r.out = d->s.next_out - out;
	dew_remember(d, out, r.out);
	if (r.error == 0 && d->s.block_state == ISAL_BLOCK_FINISH)
		r.status = dew_stopped(d);
	else
		r.status = d->s.avail_out == 0 ? DEW_OUTPUT : DEW_INPUT;
	r.in = (int64_t)nin - d->s.avail_in;
	d->s.next_in = NULL;
	d->s.next_out = NULL;
	return r;
}

static dew_inflate *dew_new(void) {
	dew_inflate *d = malloc(sizeof *d);
	if (d != NULL) {
		isal_inflate_init(&d->s);
		dew_reset(d, NULL, 0, 0, 0);
	}
	return d;
}
*/
import "C"

import (
	"fmt"
	"unsafe"
)

const (
	isalMajor = C.ISAL_MAJOR_VERSION
	isalMinor = C.ISAL_MINOR_VERSION
)

// isalChunk bounds the output of a call in which a block's end is wanted, so
// that the call before which the flag can be set is not far.
const isalChunk = 32 << 10

// isalEngine is ISA-L's inflate. Its state is C memory.
type isalEngine struct{ c *C.dew_inflate }

func newISAL() *isalEngine {
	e := &isalEngine{c: C.dew_new()}
	if e.c == nil {
		panic("inflate: out of C memory")
	}
	return e
}

func (e *isalEngine) close() {
	C.free(unsafe.Pointer(e.c))
	e.c = nil
}

func (e *isalEngine) reset(window []byte, bits, n uint8) {
	C.dew_reset(e.c, (*C.uint8_t)(unsafe.SliceData(window)), C.size_t(len(window)), C.uint64_t(bits), C.int(n))
}

func (e *isalEngine) held() uint8 { return uint8(e.c.s.read_in_length) }

func (e *isalEngine) window() []byte {
	return C.GoBytes(unsafe.Pointer(&e.c.hist[0]), C.int(e.c.nhist))
}

func (e *isalEngine) inflate(in, out []byte, stop bool) (nIn, nOut int, st status, err error) {
	if stop {
		out = out[:min(len(out), isalChunk)]
	}
	r := C.dew_run(e.c,
		(*C.uint8_t)(unsafe.SliceData(in)), C.size_t(len(in)),
		(*C.uint8_t)(unsafe.SliceData(out)), C.size_t(len(out)), toC(stop))
	if r.error != 0 {
		err = isalError(int(r.error))
	}
	return int(r.in), int(r.out), isalStatus(r.status), err
}

func toC(b bool) C.int {
	if b {
		return 1
	}
	return 0
}

func isalStatus(s C.int) status {
	switch s {
	case C.DEW_OUTPUT:
		return outFull
	case C.DEW_BLOCK:
		return atBlock
	case C.DEW_END:
		return atEnd
	}
	return needInput
}

func isalError(code int) error {
	switch code {
	case C.ISAL_INVALID_BLOCK:
		return corrupt("invalid deflate block")
	case C.ISAL_INVALID_SYMBOL:
		return corrupt("invalid deflate code")
	case C.ISAL_INVALID_LOOKBACK:
		return corrupt("deflate distance too far back")
	}
	return corrupt(fmt.Sprintf("isa-l error %d", code))
}
