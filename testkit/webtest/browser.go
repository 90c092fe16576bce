// Package webtest looks at the page as a person does, in headless Chromium.
package webtest

import (
	"context"
	"fmt"
	"os/exec"
	"strings"
	"testing"
	"time"

	"dewpoint/testkit"

	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
)

// Open opens the page in headless Chromium. What the page throws fails the test.
func Open(t testing.TB, url string) context.Context {
	t.Helper()
	program, err := exec.LookPath("chromium")
	if err != nil {
		t.Fatal("chromium is not installed: run scripts/install test")
	}
	opts := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.ExecPath(program), chromedp.NoSandbox,
		chromedp.WindowSize(1280, 900), chromedp.UserDataDir(t.TempDir()), chromedp.WSURLReadTimeout(time.Minute))
	ctx, cancel := context.WithTimeout(context.Background(), 3*testkit.Limit)
	t.Cleanup(cancel)
	ctx, cancel = chromedp.NewExecAllocator(ctx, opts...)
	t.Cleanup(cancel)
	ctx, cancel = chromedp.NewContext(ctx)
	t.Cleanup(func() {
		if err := chromedp.Cancel(ctx); err != nil {
			t.Log(err)
		}
		cancel()
	})
	chromedp.ListenTarget(ctx, func(ev any) {
		if e, ok := ev.(*runtime.EventExceptionThrown); ok {
			t.Errorf("the page throws %s", e.ExceptionDetails)
		}
	})
	Do(t, ctx, chromedp.Navigate(url))
	return ctx
}

// Do runs actions in the page.
func Do(t testing.TB, ctx context.Context, actions ...chromedp.Action) {
	t.Helper()
	if err := chromedp.Run(ctx, actions...); err != nil {
		t.Fatal(err)
	}
}

// Sees waits until a person sees all the texts within the element.
func Sees(t testing.TB, ctx context.Context, element string, texts ...string) {
	t.Helper()
	var got string
	deadline := time.Now().Add(testkit.Limit)
	for ; time.Now().Before(deadline); time.Sleep(100 * time.Millisecond) {
		Do(t, ctx, chromedp.Evaluate(fmt.Sprintf(`document.querySelector(%q)?.innerText || ""`, element), &got))
		missing := false
		for _, text := range texts {
			missing = missing || !strings.Contains(got, text)
		}
		if !missing {
			return
		}
	}
	t.Fatalf("%s shows %q, and not all of %q", element, got, texts)
}
