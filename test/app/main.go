// App is what the system tests deploy: one static binary that serves HTTP and
// shows what it sees of its container.
//
//	app serve PORT   answers with its arguments; /exit?N ends it, /cat?PATH gives a file, /sum?PATH its sha256,
//	                 /env?NAME a variable, /absent?PATH status 503 once there is such a file
//	app slow PORT    serve, after 1.5 s, in which it makes the file /state and a number; /count
//	                 counts, /born is the number; it locks the file that LOCK names, if that is set, and
//	                 has the one open that OPEN names, of which /opened is the sha256
//	app cat PATH
//	app sum PATH     the sha256 of a file, or why there is none
//	app each PATH…   app sum for each, all at once
//	app append PATH TEXT, app chmod PATH MODE, app rename PATH PATH
//	app sleep TIME
//	app once PATH TIME   writes "once" to a file and sleeps; "again", at once, to one that is there
//	app exit STATUS
package main

import (
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

func main() {
	if len(os.Args) < 3 {
		fmt.Fprintln(os.Stderr,
			"usage: app serve PORT | cat PATH | sum PATH | each PATH… | append PATH TEXT | chmod PATH MODE | rename PATH PATH | sleep TIME | talk - | exit STATUS")
		os.Exit(2)
	}
	switch arg := os.Args[2]; os.Args[1] {
	case "slow":
		boot()
		serve(arg)
	case "serve":
		serve(arg)
	case "talk": // says what it is told
		_, _ = io.Copy(os.Stdout, os.Stdin)
	case "cat":
		cat(os.Stdout, arg)
	case "sum":
		sum(os.Stdout, arg)
	case "append", "chmod", "rename":
		if err := change(os.Args[1], arg, os.Args[3]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	case "sleep":
		d, _ := time.ParseDuration(arg)
		time.Sleep(d)
	case "once":
		once(arg, os.Args[3])
	case "each":
		each(os.Args[2:])
	case "exit":
		exit(arg)
	}
}

func serve(port string) {
	fmt.Println("serving on", port)
	http.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) { fmt.Fprintln(w, os.Args) })
	http.HandleFunc("/exit", func(_ http.ResponseWriter, r *http.Request) { exit(r.URL.RawQuery) })
	http.HandleFunc("/cat", func(w http.ResponseWriter, r *http.Request) { cat(w, r.URL.RawQuery) })
	http.HandleFunc("/env", func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintln(w, os.Getenv(r.URL.RawQuery))
	})
	http.HandleFunc("/absent", func(w http.ResponseWriter, r *http.Request) { absent(w, r.URL.RawQuery) })
	http.HandleFunc("/sum", func(w http.ResponseWriter, r *http.Request) { sum(w, r.URL.RawQuery) })
	fmt.Fprintln(os.Stderr, http.ListenAndServe(":"+port, nil))
	os.Exit(1)
}

// boot is a start that takes its time. What it makes is in memory and in a file.
func boot() {
	time.Sleep(1500 * time.Millisecond)
	born := rand.Text()
	if err := os.WriteFile("/state", []byte(born+"\n"), 0o600); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	mb, _ := strconv.Atoi(os.Getenv("MEMORY_MB"))
	if path := os.Getenv("LOCK"); path != "" {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
		if err == nil {
			err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		http.HandleFunc("/locked", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, path) })
	}
	if path := os.Getenv("OPEN"); path != "" {
		f, err := os.Open(path)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		http.HandleFunc("/opened", func(w http.ResponseWriter, _ *http.Request) {
			h := sha256.New()
			if _, err := io.Copy(h, io.NewSectionReader(f, 0, math.MaxInt64)); err != nil {
				fmt.Fprintln(w, err)
				return
			}
			fmt.Fprintf(w, "%x\n", h.Sum(nil))
		})
	}
	memory := make([]byte, mb<<20)
	rand.Read(memory)
	var count atomic.Int64
	http.HandleFunc("/memory", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintf(w, "%x\n", sha256.Sum256(memory))
	})
	http.HandleFunc("/born", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, born) })
	http.HandleFunc("/count", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, count.Add(1)) })
	http.HandleFunc("/host", func(w http.ResponseWriter, _ *http.Request) {
		name, _ := os.Hostname()
		fmt.Fprintln(w, name)
	})
}

func once(path, sleep string) {
	d, err := time.ParseDuration(sleep)
	f, ferr := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	switch {
	case errors.Is(ferr, os.ErrExist):
		err = change("append", path, "again\n")
	case ferr == nil && err == nil:
		_, err = f.WriteString("once\n")
		time.Sleep(d)
	default:
		err = errors.Join(err, ferr)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// absent is well as long as there is no such file.
func absent(w http.ResponseWriter, path string) {
	if _, err := os.Lstat(path); err == nil {
		w.WriteHeader(http.StatusServiceUnavailable)
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

func sum(w io.Writer, path string) {
	b, err := os.ReadFile(path)
	if err != nil {
		fmt.Fprintln(w, err)
		return
	}
	fmt.Fprintf(w, "%x\n", sha256.Sum256(b))
}

// change changes a file of the container's.
func change(how, path, to string) error {
	switch how {
	case "chmod":
		mode, err := strconv.ParseUint(to, 8, 32)
		if err != nil {
			return err
		}
		return os.Chmod(path, os.FileMode(mode))
	case "rename":
		return os.Rename(path, to)
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_APPEND, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(to)
	return errors.Join(err, f.Close())
}

// each runs one process for each path, and prints what they print in the
// paths' order.
func each(paths []string) {
	out := make([][]byte, len(paths))
	var all sync.WaitGroup
	for i, path := range paths {
		all.Go(func() {
			var err error
			if out[i], err = exec.Command(os.Args[0], "sum", path).CombinedOutput(); err != nil {
				out[i] = append(out[i], err.Error()+"\n"...)
			}
		})
	}
	all.Wait()
	for i, path := range paths {
		fmt.Printf("%s %s", path, out[i])
	}
}

func exit(s string) {
	n, _ := strconv.Atoi(s)
	os.Exit(n)
}
