// Website is the static binary of the image "goweb": an HTTP server and
// nothing else, no library, no file beside it.
package main

import (
	"fmt"
	"log"
	"net/http"
	"os"
	"runtime"
	"time"
)

func main() {
	start := time.Now()
	http.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "It serves, by %s, for %s.\n", runtime.Version(), time.Since(start).Round(time.Second))
	})
	address := ":8080"
	if len(os.Args) > 1 {
		address = os.Args[1]
	}
	log.Fatal(http.ListenAndServe(address, nil))
}
