package state

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// ID names this container and no other one: names come again, IDs do not. Each method that takes a name takes
// an ID in its place, and acts on that container or on none: ErrNotFound says that it is gone, also when
// another one has its name.
func (i *Info) ID() string { return i.Name + "@" + strconv.FormatInt(i.Created.UnixNano(), 36) }

// Name is that of the container which a name or an ID stands for.
func Name(id string) string {
	name, _, _ := strings.Cut(id, "@")
	return name
}

// means reports whether a name or an ID stands for a container that was made at that time and has its name.
func means(id string, made time.Time) bool {
	_, when, isID := strings.Cut(id, "@")
	return !isID || when == strconv.FormatInt(made.UnixNano(), 36)
}

// Meant is ErrNotFound unless id stands for the container of a record.
func (r Record) Meant(id string) error {
	if !means(id, r.Made) {
		return fmt.Errorf("%w: another one has its name by now", ErrNotFound)
	}
	return nil
}
