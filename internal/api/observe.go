package api

import (
	"context"
	"errors"
	"time"

	"connectrpc.com/connect"
)

// observer is an interceptor that tells how calls ended. nil tells nobody.
type observer func(procedure, code string, took time.Duration)

func (o observer) end(s connect.Spec, begun time.Time, err error) {
	if o != nil {
		o(s.Procedure, string(codeOf(err)), time.Since(begun))
	}
}

// codeOf is the code of what a handler returned.
func codeOf(err error) Code {
	var ce *connect.Error
	switch {
	case err == nil:
		return "ok"
	case errors.As(err, &ce):
		if e := unwire(ce); e != nil {
			return e.Code
		}
		if ce.Code() == connect.CodeInvalidArgument {
			return BadRequest
		}
	}
	return Classify(err).Code
}

// WrapUnary implements connect.Interceptor.
func (o observer) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		begun := time.Now()
		resp, err := next(ctx, req)
		o.end(req.Spec(), begun, err)
		return resp, err
	}
}

// WrapStreamingClient implements connect.Interceptor.
func (o observer) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

// WrapStreamingHandler implements connect.Interceptor.
func (o observer) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) error {
		begun := time.Now()
		err := next(ctx, conn)
		o.end(conn.Spec(), begun, err)
		return err
	}
}
