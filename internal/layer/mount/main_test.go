package mount_test

import (
	"testing"

	"dewpoint/testkit/mounttest"
)

func TestMain(m *testing.M) { mounttest.Main(m) }
