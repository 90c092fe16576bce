package trace

import (
	"context"
	"net/http"

	"go.opentelemetry.io/otel/propagation"
)

// Header is the HTTP header by which a caller says which trace a call belongs
// to (W3C Trace Context).
const Header = "Traceparent"

// FromHeader is ctx with the remote span of a call's headers, if they have one.
func FromHeader(ctx context.Context, h http.Header) context.Context {
	if h.Get(Header) == "" {
		return ctx
	}
	return propagation.TraceContext{}.Extract(ctx, propagation.HeaderCarrier(h))
}

// Handler serves h with the remote spans of calls in their contexts.
func Handler(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if ctx := FromHeader(r.Context(), r.Header); ctx != r.Context() {
			r = r.WithContext(ctx)
		}
		h.ServeHTTP(w, r)
	})
}
