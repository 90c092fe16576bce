package bench

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"
)

// dialer connects to an application.
type dialer func(ctx context.Context, network, address string) (net.Conn, error)

// application is how a user sees that an image serves.
type application struct {
	ready string // what dew is told to wait for
	ask   func(context.Context, dialer) error
}

// applications by the image's name, without its tag.
var applications = map[string]application{
	"nginx":          page(80),
	"nginx-official": page(80),
	"httpd":          page(80),
	"python":         page(8000),
	"node":           page(3000),
	"java":           page(8081),
	"goweb":          page(8080),
	"redis":          {"tcp:6379", talk(6379, "PING\r\n", "+PONG\r\n")},
	"mariadb":        {"tcp:3306", talk(3306, "", "")},
	"realtime":       page(3000),
	"updater":        page(3000),
	"web":            page(3000),
	"docstore":       page(8000),
	"spelling":       page(8000),
	"tracker":        page(8000),
	"clsi":           page(8000),
	"chat":           page(8080),
	"memory":         page(8080),
	"ferretdb":       {"tcp:27017", listIndexes},
}

func applicationOf(image string) (application, error) {
	name, _, _ := strings.Cut(image, ":")
	app, ok := applications[name]
	if !ok {
		return app, fmt.Errorf("image %s is not known to answer anything", image)
	}
	return app, nil
}

// page is an application that answers 200 at its root.
func page(port int) application {
	url := fmt.Sprintf("http://127.0.0.1:%d/", port)
	return application{fmt.Sprintf("http:%d/", port), func(ctx context.Context, dial dialer) error {
		client := http.Client{Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}}
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return err
		}
		resp, err := client.Do(req)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			return fmt.Errorf("%s: %s", url, resp.Status)
		}
		_, err = io.Copy(io.Discard, io.LimitReader(resp.Body, 1<<20))
		return err
	}}
}

// talk sends a line and wants an answer; without a line it wants a greeting,
// whatever it is.
func talk(port int, line, want string) func(context.Context, dialer) error {
	return func(ctx context.Context, dial dialer) error {
		conn, err := dial(ctx, "tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			return err
		}
		defer conn.Close()
		conn.SetDeadline(time.Now().Add(time.Second))
		if _, err := io.WriteString(conn, line); err != nil {
			return err
		}
		answer := make([]byte, max(5, len(want)))
		n, err := io.ReadFull(conn, answer)
		if err != nil {
			return fmt.Errorf("port %d answered %q: %w", port, answer[:n], err)
		}
		if line != "" && string(answer) != want {
			return fmt.Errorf("port %d answered %q", port, answer)
		}
		return nil
	}
}

// What a MongoDB client says to list the indexes of the collection "files" (an OP_MSG with
// {listIndexes: "files", $db: "files"}), and the one that the service makes last.
const (
	indexMessage = "@\x00\x00\x00\x07\x00\x00\x00\x00\x00\x00\x00\xdd\x07\x00\x00\x00\x00\x00\x00\x00" +
		"+\x00\x00\x00\x02listIndexes\x00\x06\x00\x00\x00files\x00\x02$db\x00\x06\x00\x00\x00files\x00\x00"
	indexAnswer = "project_1"
)

// listIndexes wants to see it. It is patient: FerretDB 1.24 keeps a connection to
// its database for ever when a client goes in the middle of a question.
func listIndexes(ctx context.Context, dial dialer) error {
	conn, err := dial(ctx, "tcp", "127.0.0.1:27017")
	if err != nil {
		return err
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(time.Minute))
	if _, err := io.WriteString(conn, indexMessage); err != nil {
		return err
	}
	var length [4]byte
	if _, err := io.ReadFull(conn, length[:]); err != nil {
		return err
	}
	rest := make([]byte, min(binary.LittleEndian.Uint32(length[:]), 4096)-4)
	if _, err := io.ReadFull(conn, rest); err != nil {
		return err
	}
	if !bytes.Contains(rest, []byte(indexAnswer)) {
		return fmt.Errorf("port 27017 answered %q", rest)
	}
	return nil
}

// askOnce asks an image's application once, from where it is called: what the
// script does that exercises a container while it is profiled.
func askOnce(ctx context.Context, args []string, _, _ io.Writer) error {
	if len(args) != 1 {
		return errors.New("usage: bench ask IMAGE")
	}
	app, err := applicationOf(args[0])
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	var d net.Dialer
	return app.ask(ctx, d.DialContext)
}
