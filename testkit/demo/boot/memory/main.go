// Command service holds MEMORY_MB of data, of which every other 2 KiB repeats
// what is before it, and serves the page that it is asked for.
package main

import (
	"encoding/binary"
	"fmt"
	"net/http"
	"os"
	"strconv"
)

func main() {
	mb, err := strconv.Atoi(os.Getenv("MEMORY_MB"))
	if err != nil {
		fmt.Fprintln(os.Stderr, "MEMORY_MB:", err)
		os.Exit(2)
	}
	data := make([]byte, mb<<20)
	fill(data)
	pages := len(data) / 4096
	http.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		n, _ := strconv.Atoi(r.URL.Path[1:])
		w.Write(data[n%pages*4096:][:4096])
	})
	fmt.Fprintln(os.Stderr, http.ListenAndServe("0.0.0.0:8080", nil))
}

func fill(data []byte) {
	x := uint64(88172645463325252)
	for at := 0; at+4096 <= len(data); at += 4096 {
		for i := 0; i < 2048; i += 8 {
			x ^= x << 13
			x ^= x >> 7
			x ^= x << 17
			binary.LittleEndian.PutUint64(data[at+i:], x)
		}
		copy(data[at+2048:at+4096], data[at:at+2048])
	}
}
