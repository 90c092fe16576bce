// Probe is the only program in the image that the tests run.
package main

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

func main() {
	verbs := map[string]func([]string){
		"sleep": doze, "exit": leave, "say": say, "serve": serve, "stubborn": stubborn, "env": env,
		"id": id, "cat": cat, "read": read, "count": count, "net": links, "hog": hog, "late": late,
		"orphan": orphan, "much": much, "talk": talk,
	}
	verbs[os.Args[1]](os.Args[2:])
}

func doze([]string) { time.Sleep(time.Hour) }

func leave(a []string) {
	fmt.Fprintln(os.Stderr, "last words")
	n, _ := strconv.Atoi(a[0])
	os.Exit(n)
}

func say(a []string) { fmt.Println(a[0]); fmt.Fprintln(os.Stderr, a[1]) }

// serve [ADDR] answers HTTP after an optional DELAY.
func serve(a []string) {
	if len(a) > 1 {
		d, _ := time.ParseDuration(a[1])
		time.Sleep(d)
	}
	http.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "hello from %s", r.RemoteAddr)
	})
	http.HandleFunc("/bad", func(w http.ResponseWriter, r *http.Request) { http.Error(w, "no", 503) })
	l, err := net.Listen("tcp", a[0])
	if err != nil {
		fmt.Println(err)
		os.Exit(9)
	}
	fmt.Println("serving") // from here on connections are accepted
	fmt.Println(http.Serve(l, nil))
	os.Exit(9)
}

// stubborn ignores SIGTERM.
func stubborn([]string) {
	signal.Ignore(syscall.SIGTERM)
	fmt.Println("ignoring")
	time.Sleep(time.Hour)
}

func env([]string) {
	wd, _ := os.Getwd()
	fmt.Println(strings.Join(append(os.Environ(), "wd="+wd), "\n"))
}

func id([]string) {
	g, _ := os.Getgroups()
	fmt.Println(os.Getuid(), os.Getgid(), g)
}

func cat(a []string) {
	for _, p := range a {
		b, err := os.ReadFile(p)
		if err != nil {
			fmt.Println(err)
		}
		os.Stdout.Write(b)
	}
}

func read([]string) { b, _ := io.ReadAll(os.Stdin); fmt.Printf("read %d bytes", len(b)) }

func count([]string) {
	for i := 0; ; i++ {
		fmt.Println(i)
		time.Sleep(10 * time.Millisecond)
	}
}

func links([]string) {
	e, _ := os.ReadDir("/sys/class/net")
	for _, d := range e {
		b, _ := os.ReadFile("/sys/class/net/" + d.Name() + "/flags")
		fmt.Println(d.Name(), strings.TrimSpace(string(b)))
	}
}

// hog uses memory until it is killed.
func hog([]string) {
	var keep [][]byte
	for {
		b := make([]byte, 1<<20)
		for i := range b {
			b[i] = 1
		}
		keep = append(keep, b)
	}
}

// much LINES writes lines of 100 bytes.
func much(a []string) {
	n, _ := strconv.Atoi(a[0])
	for i := range n {
		fmt.Printf("%-99d\n", i)
	}
}

// late DELAY says "up" after a while.
func late(a []string) {
	d, _ := time.ParseDuration(a[0])
	time.Sleep(d)
	fmt.Print("service is up on port 1")
	time.Sleep(time.Hour)
}

// talk answers each line that it reads: "size" by the terminal's size, "exit N" by its end.
func talk([]string) {
	_, err := unix.IoctlGetWinsize(0, unix.TIOCGWINSZ)
	fmt.Println("terminal:", err == nil, os.Getenv("TERM"))
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		word, n, _ := strings.Cut(in.Text(), " ")
		switch word {
		case "size":
			z, _ := unix.IoctlGetWinsize(0, unix.TIOCGWINSZ)
			fmt.Printf("%dx%d\n", z.Col, z.Row)
		case "exit":
			status, _ := strconv.Atoi(n)
			os.Exit(status)
		default:
			fmt.Println("got", in.Text())
		}
	}
	fmt.Println("end")
}

func orphan([]string) {}
