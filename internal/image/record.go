package image

import (
	"encoding/json"
	"fmt"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// record is an Image as it lies on disk: the documents and what names them.
type record struct {
	Ref      Reference          `json:"ref"`
	Target   ocispec.Descriptor `json:"target"`
	Index    []byte             `json:"index,omitempty"`
	Desc     ocispec.Descriptor `json:"desc"`
	Manifest []byte             `json:"manifest"`
	Config   []byte             `json:"config"`
}

// MarshalJSON gives the image's record.
func (i *Image) MarshalJSON() ([]byte, error) {
	return json.Marshal(record{i.Ref, i.Target, i.Index, i.Desc, i.Manifest, i.Config})
}

// UnmarshalJSON reads a record and verifies it as New does, so that a record
// that was damaged is an error and not an image.
func (i *Image) UnmarshalJSON(b []byte) error {
	var r record
	if err := json.Unmarshal(b, &r); err != nil {
		return fmt.Errorf("image record: %w", err)
	}
	img, err := New(r.Ref, r.Target, r.Index, r.Desc, r.Manifest, r.Config)
	if err != nil {
		return fmt.Errorf("image record of %s: %w", r.Ref, err)
	}
	*i = *img
	return nil
}
