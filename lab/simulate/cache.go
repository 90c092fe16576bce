package simulate

import (
	"dewpoint/internal/evict"
)

// blob is what the simulation knows of one, shared by all caches.
type blob struct {
	evict.Object
	images []uint32 // hashes of the first few images that asked for it
}

// maxImages bounds what is remembered of who shares a blob: above it, one more makes no difference.
const maxImages = 16

// askedBy reports whether image is one that had not asked for the blob.
func (b *blob) askedBy(image string) bool {
	h := hash(image)
	for _, i := range b.images {
		if i == h {
			return false
		}
	}
	if len(b.images) == maxImages {
		return false
	}
	b.images = append(b.images, h)
	b.Images = len(b.images)
	return true
}

// hash is FNV-1a.
func hash(s string) uint32 {
	h := uint32(2166136261)
	for i := range len(s) {
		h = (h ^ uint32(s[i])) * 16777619
	}
	return h
}

// cache is a disk of capacity bytes and a policy that says what is on it.
type cache struct {
	policy   evict.Policy
	there    map[string]int64 // sizes
	used     int64
	capacity int64
}

func newCache(policy string, capacity int64) (*cache, error) {
	p, err := newPolicy(policy, capacity)
	if err != nil {
		return nil, err
	}
	return &cache{policy: p, there: make(map[string]int64), capacity: capacity}, nil
}

// get reads the blob, and says whether it was there. If not, it is now, unless it is larger than the whole
// cache.
func (c *cache) get(o evict.Object) bool {
	if _, hit := c.there[o.Key]; hit {
		c.policy.Hit(o.Key)
		return true
	}
	if o.Size > c.capacity {
		return false
	}
	for c.used+o.Size > c.capacity {
		key, _ := c.policy.Victim(nil) // there is one: used is not 0
		c.used -= c.there[key]
		delete(c.there, key)
		c.policy.Remove(key)
	}
	c.policy.Add(o)
	c.there[o.Key] = o.Size
	c.used += o.Size
	return false
}

// describe tells the policy what has become known of a blob.
func (c *cache) describe(o evict.Object) {
	if size, ok := c.there[o.Key]; ok {
		o.Size = size
		c.policy.Add(o)
	}
}
