package state

// doubts counts what of the known is in doubt, has it asked about, and tells who waits when nothing is. Its
// fields are guarded by the mutex of the known that has it, but for wake.
type doubts struct {
	wake chan struct{} // gets a value when there is a new doubt; has room for one
	// read: what is there was read since the stream of events began, which has not ended.
	read bool
	open int           // of containers and images
	calm chan struct{} // closed when all is read and nothing in doubt; nil when nobody waits
}

// set says whether something is in doubt; flag is its own.
func (d *doubts) set(flag *bool, now bool) {
	switch {
	case now && !*flag:
		d.open++
		d.nudge()
	case !now && *flag:
		d.open--
	}
	*flag = now
	d.settle()
}

// nudge has the doubts asked about.
func (d *doubts) nudge() {
	select {
	case d.wake <- struct{}{}:
	default:
	}
}

// settle tells who waits, if nothing is in doubt.
func (d *doubts) settle() {
	if d.read && d.open == 0 && d.calm != nil {
		close(d.calm)
		d.calm = nil
	}
}

// settled is closed when nothing is in doubt, or was not at a moment since it was given.
func (k *known) settled() <-chan struct{} {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.doubts.calm == nil {
		k.doubts.calm = make(chan struct{})
	}
	calm := k.doubts.calm
	k.doubts.settle()
	return calm
}
