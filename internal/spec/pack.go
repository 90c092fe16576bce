package spec

import "time"

// ProfileEnd says how to end the recording of a container that was deployed
// with Request.Record.
type ProfileEnd struct {
	Name      string // of the container
	Discard   bool   // keep nothing of it
	Merge     bool   // keep what earlier recordings of the image have, too
	Exercised bool   // a script has exercised the container
}

// Profile is what a recording has seen.
type Profile struct {
	Name    string     `json:"name"` // of the container
	Image   string     `json:"image"`
	Digest  string     `json:"digest"`         // of the platform's manifest
	Read    int64      `json:"read"`           // bytes of the image's files that were read, in whole pages
	Files   int        `json:"files"`          // that were read
	Total   int64      `json:"total"`          // bytes of the image's layers, uncompressed
	Lost    int64      `json:"lost,omitempty"` // of the kernel's events: there was more
	Largest []FileRead `json:"largest"`        // files of which most was read
}

// FileRead is how much of a file was read.
type FileRead struct {
	Path  string `json:"path"`
	Layer string `json:"layer"` // diffID
	Read  int64  `json:"read"`  // bytes, in whole pages
	Size  int64  `json:"size,omitempty"`
}

// Pack is a startup pack.
type Pack struct {
	Image     string    `json:"image"`
	Digest    string    `json:"digest"` // of the platform's manifest
	Pack      string    `json:"pack"`   // its own digest
	Size      int64     `json:"size"`   // bytes
	Parts     PackParts `json:"parts"`
	Chunks    int       `json:"chunks"`
	Needed    int64     `json:"needed"`     // bytes that the profile says are read
	Total     int64     `json:"total"`      // bytes of the image's layers, uncompressed
	ImageSize int64     `json:"image_size"` // compressed bytes of the image
	Start     int64     `json:"start"`      // bytes of the pack that a start waits for
	Share     float64   `json:"share"`      // Start of ImageSize
	Runs      int       `json:"runs"`
	Exercised bool      `json:"exercised"`
	Created   time.Time `json:"created"`
	Node      string    `json:"node,omitempty"` // where it was learned
	From      string    `json:"from"`           // where it is: FromNode, FromRepository
	// why it is believed: pop, signed, repository; or "no: " and why it is not
	Trust   string     `json:"trust"`
	Unlazy  []string   `json:"unlazy,omitempty"` // layers (diffIDs) that it does not start lazily
	Files   int        `json:"files"`            // that it has something of
	Largest []FileRead `json:"largest"`          // files of which it has most
}

// Where a Pack is.
const (
	FromNode       = "node"       // made here
	FromRepository = "repository" // published beside the image
)

// PackParts are the bytes that a pack's parts take.
type PackParts struct {
	Header  int64 `json:"header"`
	Tables  int64 `json:"tables"`
	Chunks  int64 `json:"chunks"`
	Points  int64 `json:"points"`
	Windows int64 `json:"windows"`
	Files   int64 `json:"files"`
}

// PackPush is one instruction to publish an image's pack beside it.
type PackPush struct {
	Image string
	Key   []byte // private key to sign with, PEM; nil does not sign
}

// PackPushed says what was published.
type PackPushed struct {
	Image    string `json:"image"`
	Manifest string `json:"manifest"` // digest of the artifact
	Pack     string `json:"pack"`     // digest of the pack
	Size     int64  `json:"size"`     // bytes of the pack
	Signed   bool   `json:"signed"`
}
