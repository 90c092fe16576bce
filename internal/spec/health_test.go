package spec

import (
	"reflect"
	"strings"
	"testing"
	"time"
)

func TestHealthOver(t *testing.T) {
	image := &Health{Test: []string{"CMD", "/check"}, Interval: time.Second, Retries: 7}
	for _, c := range []struct {
		over, image, want *Health
		bad               bool
	}{
		{nil, nil, nil, false},
		{nil, image, image, false},
		{&Health{Interval: time.Minute}, image, &Health{Test: image.Test, Interval: time.Minute, Retries: 7},
			false},
		{&Health{Test: []string{"CMD-SHELL", "x"}}, image,
			&Health{Test: []string{"CMD-SHELL", "x"}, Interval: time.Second, Retries: 7}, false},
		{&Health{Test: []string{"NONE"}}, image, &Health{Test: []string{"NONE"}, Interval: time.Second, Retries: 7},
			false},
		{&Health{Test: []string{"CMD", "x"}, Retries: 1}, nil, &Health{Test: []string{"CMD", "x"}, Retries: 1}, false},
		{&Health{Interval: time.Minute}, nil, nil, true},
		{&Health{Interval: time.Minute}, &Health{Test: []string{"NONE"}}, nil, true},
	} {
		got, err := c.over.Over(c.image)
		if !reflect.DeepEqual(got, c.want) || (err != nil) != c.bad {
			t.Errorf("%+v over %+v: %+v, %v", c.over, c.image, got, err)
		}
	}
}

func TestHealthIsValidated(t *testing.T) {
	for want, h := range map[string]Health{
		"--health-interval":  {Interval: -1},
		"--health-timeout":   {Timeout: time.Microsecond},
		"--health-retries":   {Retries: -1},
		"is not understood":  {Test: []string{"CURL"}},
		"has a zero byte":    {Test: []string{"CMD", "a\x00"}},
		"3001 bytes, and at": {Test: []string{"CMD", strings.Repeat("x", maxTest-3)}},
	} {
		if err := (Request{Image: "i", Health: &h}).Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %q", h, err, want)
		}
	}
	for _, h := range []Health{{}, {Test: []string{"NONE"}}, {Test: []string{"CMD", "x"}, Interval: time.Second}} {
		if err := (Request{Image: "i", Health: &h}).Validate(); err != nil {
			t.Errorf("%+v: %v", h, err)
		}
	}
}
