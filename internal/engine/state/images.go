package state

import (
	"slices"
	"strings"
)

// ImagePut says that the engine has registered an image.
func (k *known) ImagePut(i ImageInfo) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.sayImage(i.Name).info = &i
}

// ImageRemoved says that the engine has removed an image.
func (k *known) ImageRemoved(name string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.sayImage(name).info = nil
	k.tidyImage(name)
}

// answerImage is answer for an image; nil is that there is none.
func (k *known) answerImage(mark uint64, name string, i *ImageInfo) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	kept := k.images[name]
	if kept == nil {
		return true
	}
	if kept.said > mark {
		return false
	}
	k.sayImage(name)
	kept.info, kept.asked = i, false
	k.doubts.set(&kept.doubt, false)
	k.tidyImage(name)
	return true
}

// imageList gives the images by name.
func (k *known) imageList() []ImageInfo {
	k.mu.Lock()
	defer k.mu.Unlock()
	out := make([]ImageInfo, 0, len(k.images))
	for _, i := range k.images {
		if i.info != nil {
			out = append(out, *i.info)
		}
	}
	slices.SortFunc(out, func(a, b ImageInfo) int { return strings.Compare(a.Name, b.Name) })
	return out
}

// The rest needs mu.

// imageChanged takes in that something happened to an image: its record is to be read.
func (k *known) imageChanged(name string) {
	k.doubts.set(&k.sayImage(name).doubt, true)
}

func (k *known) sayImage(name string) *keptImage {
	i := k.images[name]
	if i == nil {
		i = new(keptImage)
		k.images[name] = i
	}
	k.said++
	i.said = k.said
	return i
}

func (k *known) tidyImage(name string) {
	if i := k.images[name]; i != nil && i.info == nil && !i.doubt && !k.reading {
		delete(k.images, name)
	}
}

func (k *known) rereadImages(mark uint64, all []ImageInfo) {
	have := map[string]bool{}
	for _, i := range all {
		have[i.Name] = true
		if old := k.images[i.Name]; old == nil || old.said <= mark {
			k.sayImage(i.Name).info = &i
		}
	}
	for name, i := range k.images {
		if !have[name] && i.said <= mark {
			i.info = nil
		}
		k.tidyImage(name)
	}
}
