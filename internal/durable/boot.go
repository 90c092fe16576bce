package durable

import (
	"os"
	"strings"
	"sync"
)

// BootID names this boot of the kernel, in 36 characters (random(4), boot_id).
// What was written and not fsynced holds as long as it stays the same. It is ""
// if the kernel does not say.
var BootID = sync.OnceValue(func() string {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
})
