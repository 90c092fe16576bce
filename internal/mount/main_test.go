package mount_test

import (
	"testing"

	"dewpoint/internal/mount/mounttest"
)

func TestMain(m *testing.M) { mounttest.Main(m) }
