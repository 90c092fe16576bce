package api

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"syscall"
	"time"

	"connectrpc.com/connect"

	pb "dewpoint/internal/api/gen/dewpoint/v1"
	"dewpoint/internal/api/gen/dewpoint/v1/dewpointv1connect"
	"dewpoint/internal/spec"
)

// DefaultHost is where dewd listens when nothing else is said.
const DefaultHost = "unix:///run/dewpoint/dewd.sock"

// DefaultTimeout as the timeout of Stop is the node's own.
const DefaultTimeout time.Duration = -1

const maxAnswer = 64 << 20 // bytes of one message from a node

// maxConns is how many connections a client makes to a node, each of which carries a thousand calls: left
// alone, Go makes one for each call that begins before the first is there, and dewd pays for them.
const maxConns = 4

// Client is a Node that a daemon serves. Every error it returns is an *Error.
// Safe for concurrent use.
type Client struct {
	*conn
	lifecycle
	volumes
}

// The parts of a Client, whose exported methods are its own.
type (
	lifecycle struct{ *conn } // what is done to a container
	volumes   struct{ *conn }
)

// conn is what the parts of a Client ask by.
type conn struct {
	rpc       dewpointv1connect.NodeClient
	transport *http.Transport
	socket    string // or host and port
	shows     bool   // a certificate of its own
	clear     bool   // over TCP without TLS
}

var _ Node = (*Client)(nil)

// Credentials are what a client shows a node that it reaches over TCP: files, "" where
// there is none.
type Credentials struct {
	CA        string // who signs the node's certificate, PEM; "" is who the system trusts
	Cert, Key string // the client's own, PEM
	Token     string // the file's first line is the token
	// Trace is the W3C trace context (traceparent) that all calls belong to; "" is none.
	Trace string
}

// Dial is DialWith without credentials.
func Dial(host string) (*Client, error) { return DialWith(host, Credentials{}) }

// DialWith prepares a Client for the daemon at host: unix:///PATH, https://HOST:PORT or, on a
// loopback address, http://HOST:PORT. Nothing is connected before the first call.
func DialWith(host string, cred Credentials) (*Client, error) {
	u, err := url.Parse(host)
	if err != nil {
		return nil, notAHost(host)
	}
	c := &conn{transport: &http.Transport{Protocols: new(http.Protocols), DisableCompression: true,
		MaxConnsPerHost: maxConns}}
	base := "http://dewd"
	switch {
	case u.Scheme == "unix" && u.Host == "" && strings.HasPrefix(u.Path, "/"):
		c.socket = u.Path
		c.transport.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", c.socket)
		}
		c.transport.Protocols.SetUnencryptedHTTP2(true)
	case u.Scheme == "https" && u.Host != "" && strings.Trim(u.Path, "/") == "":
		c.socket, base, c.shows = u.Host, "https://"+u.Host, cred.Cert != ""
		c.transport.Protocols.SetHTTP2(true)
		if c.transport.TLSClientConfig, err = cred.tls(); err != nil {
			return nil, credential(err)
		}
	case u.Scheme == "http" && net.ParseIP(u.Hostname()).IsLoopback():
		c.socket, base, c.clear = u.Host, "http://"+u.Host, true
		c.transport.Protocols.SetUnencryptedHTTP2(true)
	default:
		return nil, notAHost(host)
	}
	token, err := cred.token()
	if err != nil {
		return nil, credential(err)
	}
	c.rpc = dewpointv1connect.NewNodeClient(&http.Client{Transport: bearer{c.transport, token, cred.Trace}},
		base,
		connect.WithReadMaxBytes(maxAnswer),
		connect.WithAcceptCompression("gzip", nil, nil))
	return &Client{c, lifecycle{c}, volumes{c}}, nil
}

// credential is what is wrong with a file of the caller's.
func credential(err error) error {
	var e *Error
	if errors.As(err, &e) {
		return e
	}
	return advised(BadRequest, oneLine(err.Error()),
		"name files that can be read, in PEM, with --tls-ca, --tls-cert, --tls-key and --token-file")
}

func notAHost(host string) error {
	return advised(BadRequest, fmt.Sprintf("%q is not the address of a daemon", host),
		"want unix:///PATH, https://HOST:PORT or, on a loopback address, http://HOST:PORT")
}

func (c Credentials) tls() (*tls.Config, error) {
	cfg := &tls.Config{MinVersion: tls.VersionTLS13}
	if c.CA != "" {
		var err error
		if cfg.RootCAs, err = pool(c.CA); err != nil {
			return nil, err
		}
	}
	if c.Cert != "" || c.Key != "" {
		cert, err := tls.LoadX509KeyPair(c.Cert, c.Key)
		if err != nil {
			return nil, err
		}
		if end := cert.Leaf.NotAfter; time.Now().After(end) {
			e := New(Unauthorized,
				fmt.Sprintf("the client's certificate %s has expired on %s", c.Cert, end.Format(time.DateOnly)))
			e.Remedy = "have a new one signed"
			return nil, e
		}
		cfg.Certificates = []tls.Certificate{cert}
	}
	return cfg, nil
}

func (c Credentials) token() (string, error) {
	if c.Token == "" {
		return "", nil
	}
	b, err := os.ReadFile(c.Token)
	line, _, _ := strings.Cut(string(b), "\n")
	return strings.TrimSpace(line), err
}

// bearer adds a token, and the trace context, to what is asked.
type bearer struct {
	http.RoundTripper
	token string
	trace string
}

func (b bearer) RoundTrip(r *http.Request) (*http.Response, error) {
	if b.token != "" || b.trace != "" {
		r = r.Clone(r.Context())
	}
	if b.token != "" {
		r.Header.Set("Authorization", "Bearer "+b.token)
	}
	if b.trace != "" {
		r.Header.Set("Traceparent", b.trace)
	}
	return b.RoundTripper.RoundTrip(r)
}

// Close closes idle connections.
func (c *Client) Close() { c.transport.CloseIdleConnections() }

// call asks the node once. Beside an error the answer is empty.
func call[Q, A any](ctx context.Context, c *conn,
	rpc func(context.Context, *connect.Request[Q]) (*connect.Response[A], error), req *Q) (*A, error) {
	r, err := rpc(ctx, connect.NewRequest(req))
	if err != nil {
		return new(A), c.problem(ctx, err)
	}
	return r.Msg, nil
}

// problem makes an Error of what a call returned.
func (c *conn) problem(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	var e *Error
	if errors.As(err, &e) {
		return e
	}
	var ce *connect.Error
	if errors.As(err, &ce) {
		if e := unwire(ce); e != nil {
			return e
		}
	}
	if ctx.Err() != nil {
		return Classify(ctx.Err())
	}
	switch {
	case untrusted(err) != "":
		e := New(Unauthorized, fmt.Sprintf("dewd at %s: %s", c.socket, untrusted(err)))
		e.Remedy = "name who signs its certificate with --tls-ca; look at the dates of both certificates"
		return e
	case c.shows && cut(err):
		// With TLS 1.3 the node's alert may come behind what the client has sent.
		e := New(Unauthorized, fmt.Sprintf("dewd at %s closed the connection", c.socket))
		e.Remedy = "see whether it knows who has signed this client's certificate ([api] client_ca), and whether it runs"
		return e
	case c.clear && cut(err):
		e := New(NoDaemon, fmt.Sprintf("dewd at %s closed the connection", c.socket))
		e.Remedy = "see whether it runs, and say https:// if it has a certificate"
		return e
	case errors.Is(err, fs.ErrPermission):
		return New(Permission, fmt.Sprintf("no permission to open %s", c.socket))
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.ENOTSOCK):
		return New(NoDaemon, fmt.Sprintf("dewd does not run at %s", c.socket))
	}
	return strange(c.socket, ce, err)
}

// cut reports whether a connection was there and was closed by the other side.
func cut(err error) bool {
	for _, is := range []error{syscall.EPIPE, syscall.ECONNRESET, io.EOF, io.ErrUnexpectedEOF} {
		if errors.Is(err, is) {
			return true
		}
	}
	return strings.Contains(err.Error(), "client conn could not be established") // net/http's word for it
}

// untrusted says what is wrong with a certificate, the node's or, as the node says, the
// client's; "" if the error is another.
func untrusted(err error) string {
	var verify *tls.CertificateVerificationError
	var unknown x509.UnknownAuthorityError
	var alert tls.AlertError
	switch {
	case errors.As(err, &verify), errors.As(err, &unknown):
		return oneLine(err.Error())
	case errors.As(err, &alert), strings.Contains(err.Error(), "remote error: tls:"):
		return "it does not take the client's certificate: " + oneLine(err.Error())
	}
	return ""
}

// strange is an error that no Node made: the connection's, or an answer that
// does not come from a dewd.
func strange(socket string, ce *connect.Error, err error) error {
	if ce == nil {
		return New(NoDaemon, oneLine(fmt.Sprintf("the connection to dewd at %s broke: %v", socket, err)))
	}
	switch ce.Code() {
	case connect.CodeUnavailable, connect.CodeUnknown, connect.CodeCanceled, connect.CodeInternal:
		return New(NoDaemon, oneLine(fmt.Sprintf("the connection to dewd at %s broke: %s", socket, ce.Message())))
	case connect.CodeUnimplemented:
		return New(Unsupported, "this dewd does not know the command: its version is another")
	}
	return New(Internal, oneLine(ce.Message()))
}

// Deploy implements Deployer. Of the Watch, Hold is of no use here: see Run.
func (c *Client) Deploy(ctx context.Context, req spec.Request, w spec.Watch) (spec.Record, error) {
	record, _, err := c.deploy(ctx,
		&pb.DeployRequest{Spec: specOf(req), Key: req.Terms.Key, Deadline: durationOf(req.Terms.Deadline)}, w, nil)
	return record, err
}

// Run deploys, passes on the container's output, and returns its exit status.
// An error of code StatusUnknown says that the connection was lost while
// the container ran.
func (c *Client) Run(ctx context.Context, req spec.Request, w spec.Watch,
	emit func(spec.LogChunk) error) (spec.Record, int, error) {
	return c.deploy(ctx,
		&pb.DeployRequest{Spec: specOf(req), Attach: true, Deadline: durationOf(req.Terms.Deadline)}, w, emit)
}

func (c *Client) deploy(ctx context.Context, req *pb.DeployRequest, w spec.Watch,
	emit func(spec.LogChunk) error) (record spec.Record, status int, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.rpc.Deploy(ctx, connect.NewRequest(req))
	if err != nil {
		return record, 0, c.problem(ctx, err)
	}
	return c.receive(ctx, stream, w, req.Attach, emit)
}

// receive passes on the steps of a deployment until its end, and closes the stream.
func (c *Client) receive(ctx context.Context, stream *connect.ServerStreamForClient[pb.DeployResponse],
	w spec.Watch, attach bool, emit func(spec.LogChunk) error) (record spec.Record, status int, err error) {
	defer stream.Close()
	ended := false
	for stream.Receive() {
		switch s := stream.Msg().Step.(type) {
		case *pb.DeployResponse_Stage:
			tellStage(w, s.Stage)
		case *pb.DeployResponse_Layers:
			tellLayers(w, s.Layers)
		case *pb.DeployResponse_Deployment:
			tellDeployment(w, s.Deployment)
		case *pb.DeployResponse_Record:
			record = recordFrom(s.Record)
			ended = !attach
		case *pb.DeployResponse_Output:
			if err := emit(chunkFrom(s.Output)); err != nil {
				return record, 0, err
			}
		case *pb.DeployResponse_Exit:
			status, ended = int(s.Exit.Status), true
		}
	}
	err = c.problem(ctx, stream.Err())
	if err == nil && !ended {
		err = New(NoDaemon, "dewd ended the call early")
	}
	return record, status, lost(err, attach && record.Image != "" && record.Error == "")
}

// lost says of a connection that broke while a container ran that its status
// is unknown.
func lost(err error, running bool) error {
	var e *Error
	if running && errors.As(err, &e) && (e.Code == NoDaemon || e.Code == Stopping) {
		return New(StatusUnknown, e.Message+"; the container goes on")
	}
	return err
}

func tellStage(w spec.Watch, s *pb.Stage) {
	if w.Reached != nil {
		w.Reached(s.GetName(), s.GetStage(), s.GetAt())
	}
}

func tellLayers(w spec.Watch, l *pb.Layers) {
	if w.Layer == nil {
		return
	}
	for _, l := range l.GetLayers() {
		w.Layer(layerFrom(l))
	}
}

// Pull implements Deployer.
func (c *Client) Pull(ctx context.Context, req spec.PullRequest, w spec.Watch) (record spec.Record,
	err error) {
	stream, err := c.rpc.Pull(ctx, connect.NewRequest(pullOf(req)))
	if err != nil {
		return record, c.problem(ctx, err)
	}
	defer stream.Close()
	for stream.Receive() {
		switch s := stream.Msg().Step.(type) {
		case *pb.PullResponse_Stage:
			tellStage(w, s.Stage)
		case *pb.PullResponse_Layers:
			tellLayers(w, s.Layers)
		case *pb.PullResponse_Record:
			record = recordFrom(s.Record)
		}
	}
	return record, c.problem(ctx, stream.Err())
}

// List implements Containers.
func (c *Client) List(ctx context.Context, all bool) ([]spec.Container, error) {
	r, err := call(ctx, c.conn, c.rpc.List, &pb.ListRequest{All: all})
	return each(r.Containers, containerFrom), err
}

// Logs implements Containers.
func (c *Client) Logs(ctx context.Context, name string, opt spec.LogOptions,
	emit func(spec.LogChunk) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.rpc.Logs(ctx,
		connect.NewRequest(&pb.LogsRequest{Name: name, Follow: opt.Follow, Tail: int32(opt.Tail)}))
	if err != nil {
		return c.problem(ctx, err)
	}
	defer stream.Close()
	for stream.Receive() {
		if err := emit(chunkFrom(stream.Msg().Output)); err != nil {
			return err
		}
	}
	return c.problem(ctx, stream.Err())
}

// Wait implements Containers.
func (c *Client) Wait(ctx context.Context, name string) (int, error) {
	r, err := call(ctx, c.conn, c.rpc.Wait, &pb.WaitRequest{Name: name})
	return int(r.Status), err
}

// Images implements Images.
func (c *Client) Images(ctx context.Context) ([]spec.Image, error) {
	r, err := call(ctx, c.conn, c.rpc.Images, &pb.ImagesRequest{})
	return each(r.Images, imageFrom), err
}

// RemoveImage implements Images.
func (c *Client) RemoveImage(ctx context.Context, name string) error {
	_, err := c.rpc.RemoveImage(ctx, connect.NewRequest(&pb.RemoveImageRequest{Name: name}))
	return c.problem(ctx, err)
}

// Prune implements Images.
func (c *Client) Prune(ctx context.Context, opt spec.PruneOptions) (spec.PruneReport, error) {
	r, err := call(ctx, c.conn, c.rpc.Prune, pruneOf(opt))
	return prunedFrom(r), err
}

// Doctor implements Observer.
func (c *Client) Doctor(ctx context.Context) ([]spec.Finding, error) {
	r, err := call(ctx, c.conn, c.rpc.Doctor, &pb.DoctorRequest{})
	return each(r.Findings, findingFrom), err
}

// Version implements Observer.
func (c *Client) Version(ctx context.Context) (spec.Version, error) {
	r, err := call(ctx, c.conn, c.rpc.Version, &pb.VersionRequest{})
	return versionFrom(r), err
}

// Events implements Observer.
func (c *Client) Events(ctx context.Context, after *spec.Mark, begun func() error,
	emit func(spec.Event) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	req := &pb.EventsRequest{}
	if after != nil {
		req.After, req.Epoch = &after.Seq, after.Epoch
	}
	stream, err := c.rpc.Events(ctx, connect.NewRequest(req))
	if err != nil {
		return c.problem(ctx, err)
	}
	defer stream.Close()
	if begun != nil && len(stream.ResponseHeader()) > 0 { // it waits for them; what failed is told below
		if err := begun(); err != nil {
			return err
		}
	}
	for stream.Receive() {
		if err := emit(eventFrom(stream.Msg().Event)); err != nil {
			return err
		}
	}
	return c.problem(ctx, stream.Err())
}

// Exec implements Containers.
func (c *Client) Exec(ctx context.Context, name string, req spec.ExecRequest, std spec.ExecIO) (int, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	return c.interact(ctx, c.rpc.Exec(ctx), execOf(name, req, std.Stdin != nil), std)
}

// Attach implements Containers.
func (c *Client) Attach(ctx context.Context, name string, size spec.Size, std spec.ExecIO) (int, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	return c.interact(ctx, c.rpc.Attach(ctx), &pb.ExecRequest_Start{Name: name, Stdin: std.Stdin != nil,
		Size: sizeOf(size), InputOnly: std.Stdout == nil && std.Stderr == nil}, std)
}

// interact is the client's side of a call that passes input and output, until it ends.
func (c *Client) interact(ctx context.Context, stream *execClientStream, start *pb.ExecRequest_Start,
	std spec.ExecIO) (int, error) {
	defer func() {
		_ = stream.CloseRequest()
		_ = stream.CloseResponse()
	}()
	// HTTP/2 of net/http does not see ctx end while it waits for more of a request.
	defer context.AfterFunc(ctx, func() { _ = stream.CloseRequest() })()
	s := &execSender{stream: stream, ctx: ctx}
	// Whatever is wrong with the call is told by Receive.
	_ = s.send(&pb.ExecRequest{Message: &pb.ExecRequest_Start_{Start: start}})
	if std.Stdin != nil {
		go s.copy(std.Stdin, len(start.Args) > 0)
	}
	if std.Resize != nil {
		go s.resize(std.Resize)
	}
	for {
		m, err := stream.Receive()
		if errors.Is(err, io.EOF) {
			return 0, New(NoDaemon, "dewd ended the call early")
		}
		if err != nil {
			return 0, c.problem(ctx, err)
		}
		switch m := m.Message.(type) {
		case *pb.ExecResponse_Exit:
			return int(m.Exit.Status), nil
		case *pb.ExecResponse_Output:
			if err := write(std, m.Output); err != nil {
				return 0, err
			}
		}
	}
}

func write(std spec.ExecIO, o *pb.Output) error {
	w := std.Stdout
	if o.GetStream() == pb.Output_STREAM_STDERR {
		w = std.Stderr
	}
	_, err := w.Write(o.GetData())
	return err
}
