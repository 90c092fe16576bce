package criu_test

import (
	"testing"

	"dewpoint/internal/checkpoint/enginetest"
)

func TestContract(t *testing.T) {
	for name, prog := range containerds() {
		t.Run(name, func(t *testing.T) { enginetest.Run(t, newBed(t, prog)) })
	}
}
