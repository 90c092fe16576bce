package checkpoint

import (
	"maps"
	"slices"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"dewpoint/internal/checkpoint/hooks"
	"dewpoint/internal/image"
)

// bound reports whether a mount is a volume: not a file of the container's own, nor the hooks' agents.
func bound(m specs.Mount) bool {
	return m.Type == "bind" && m.Destination != hooks.AgentsDir && !slices.Contains(ownFiles, m.Destination)
}

// freeVolumes are the targets that the container's labels, or its image's, leave to each container.
func freeVolumes(img *image.Image, own map[string]string) []string {
	return strings.Fields(labelsOf(img, own)[LabelVolumes])
}

// state is what a container keeps beside its memory, that clones would share or undo.
type state struct {
	label  bool   // LabelCheckpoint says that it keeps some
	volume string // that it writes to; "" if there is none
	image  string // volume that its image declares, and that is not mounted; "" if there is none
}

// stateOf finds out what state a container of img, made by the specification o, keeps; own are its labels. A
// volume that LabelVolumes names is none, nor is one of the image where LabelCheckpoint asks for checkpoints.
func stateOf(img *image.Image, o *specs.Spec, own map[string]string) (s state) {
	label, free := labelsOf(img, own)[LabelCheckpoint], freeVolumes(img, own)
	s.label = label == "stateful"
	s.volume = written(o, free)
	if label == "auto" {
		return s
	}
	for _, v := range slices.Sorted(maps.Keys(img.Spec.Config.Volumes)) {
		mounted := slices.ContainsFunc(o.Mounts, func(m specs.Mount) bool { return m.Destination == v })
		if !mounted && !slices.Contains(free, v) {
			s.image = v
			break
		}
	}
	return s
}

// written is a volume that a container writes to, "" if there is none.
func written(o *specs.Spec, free []string) string {
	for _, m := range o.Mounts {
		if bound(m) && !slices.Contains(m.Options, "ro") && !slices.Contains(free, m.Destination) {
			return m.Destination
		}
	}
	return ""
}

// refused is why no checkpoint is made of a container that keeps this; nil if it keeps nothing.
func (s state) refused() *UnfitError {
	const wanted = "use --stateful if that is what you want"
	switch {
	case s.label:
		return &UnfitError{"its label " + LabelCheckpoint +
			"=stateful, or its image's, says that it keeps state, which clones would share", wanted}
	case s.volume != "":
		return &UnfitError{"it writes to the volume " + s.volume + ", which clones would share",
			"mount it read-only, name it in the label " + LabelVolumes +
				" if each container may have another one, or " + wanted}
	case s.image != "":
		return &UnfitError{"its image declares the volume " + s.image +
			": it keeps state, of which clones would have copies",
			wanted + ", or start it with --label " + LabelCheckpoint + "=auto if its clones may begin with that"}
	}
	return nil
}

// declined is why a container that keeps this is not started from a checkpoint unless somebody insists; "" if
// it is.
func (s state) declined() string {
	const insist = ": only --restore always starts from it"
	switch {
	case s.volume != "":
		return "what is in the volume " + s.volume + " may be newer than the memory, which would undo it" + insist
	case s.image != "":
		return "it would begin with what the saved one had in the volume " + s.image + " of the image" + insist
	case s.label:
		return "it would begin with the state of the saved one, and its label " + LabelCheckpoint +
			"=stateful, or its image's, says that it keeps its own" + insist
	}
	return ""
}
