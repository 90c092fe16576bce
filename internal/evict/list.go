package evict

// No layer has a pebibyte and no fetch takes longer than the universe: greater numbers would only overflow.
const (
	maxSize = 1 << 50
	maxCost = 1e18
)

// entry is one object with what the policies remember of it.
type entry struct {
	Object
	prev, next *entry
	in         *list
	uses       uint32  // since it came, as the policy counts them
	value      float64 // gdsf
	seq        uint64  // gdsf: its last use; no two are the same
	at         int     // gdsf: place in the heap
	gap        float64 // overdue: mean of the uses of anything between two of its own
	due        float64 // overdue: the use of anything after which it is
	dueAt      int     // overdue: place in that heap, or -1
}

// set replaces what is known of the object by o, made sensible.
func (e *entry) set(o Object) {
	o.Size = min(max(o.Size, 0), maxSize)
	if !(o.Cost > 0) { // also not a number
		o.Cost = float64(o.Size)
	}
	o.Cost = min(o.Cost, maxCost)
	o.Images = max(o.Images, 1)
	e.Object = o
}

// objects is what a policy orders, by key.
type objects struct{ all map[string]*entry }

func newObjects() objects { return objects{all: make(map[string]*entry)} }

// get is the key's entry, or nil.
func (o objects) get(key string) *entry { return o.all[key] }

func (o objects) Get(key string) (Object, bool) {
	if e := o.all[key]; e != nil {
		return e.Object, true
	}
	return Object{}, false
}

// list is entries from the newest (front) to the oldest (back). An entry is in at most one list.
type list struct {
	front, back *entry
	n           int
	bytes       int64
}

func (l *list) pushFront(e *entry) {
	e.in, e.prev, e.next = l, nil, l.front
	if l.front != nil {
		l.front.prev = e
	} else {
		l.back = e
	}
	l.front = e
	l.n++
	l.bytes += e.Size
}

func (l *list) remove(e *entry) {
	if e.prev != nil {
		e.prev.next = e.next
	} else {
		l.front = e.next
	}
	if e.next != nil {
		e.next.prev = e.prev
	} else {
		l.back = e.prev
	}
	e.in, e.prev, e.next = nil, nil, nil
	l.n--
	l.bytes -= e.Size
}

func (l *list) toFront(e *entry) {
	l.remove(e)
	l.pushFront(e)
}

// update replaces what is known of an entry that is in a list.
func update(e *entry, o Object) {
	e.in.bytes -= e.Size
	e.set(o)
	e.in.bytes += e.Size
}

// save returns the entries from the oldest to the newest.
func (l *list) save() []saved {
	out := make([]saved, 0, l.n)
	for e := l.back; e != nil; e = e.prev {
		out = append(out, save(e))
	}
	return out
}
