// App is what the system tests deploy: one static binary that serves HTTP and
// shows what it sees of its container.
//
//	app serve PORT   answers with its arguments; /exit?N ends it, /cat?PATH gives a file
//	app cat PATH
//	app exit STATUS
package main

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
)

func main() {
	if len(os.Args) < 3 {
		fmt.Fprintln(os.Stderr, "usage: app serve PORT | cat PATH | exit STATUS")
		os.Exit(2)
	}
	switch arg := os.Args[2]; os.Args[1] {
	case "serve":
		fmt.Println("serving on", arg)
		http.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) { fmt.Fprintln(w, os.Args) })
		http.HandleFunc("/exit", func(_ http.ResponseWriter, r *http.Request) { exit(r.URL.RawQuery) })
		http.HandleFunc("/cat", func(w http.ResponseWriter, r *http.Request) { cat(w, r.URL.RawQuery) })
		fmt.Fprintln(os.Stderr, http.ListenAndServe(":"+arg, nil))
		os.Exit(1)
	case "cat":
		cat(os.Stdout, arg)
	case "exit":
		exit(arg)
	}
}

func cat(w io.Writer, path string) {
	b, err := os.ReadFile(path)
	if err != nil {
		fmt.Fprintln(w, err)
		return
	}
	w.Write(b)
}

func exit(s string) {
	n, _ := strconv.Atoi(s)
	os.Exit(n)
}
