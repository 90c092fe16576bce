package datafs

import (
	"errors"

	"golang.org/x/sys/unix"
)

// worker answers requests, one after the other.
type worker struct {
	*server
	out   reply
	buf   []byte // for what is read, and a header before it
	parts []part
}

// read answers requests until the connection ends.
func (s *server) read() error {
	w := &worker{server: s, buf: make([]byte, outHeaderSize+maxRead)}
	in := make([]byte, inBuffer)
	for i := 0; i < len(in); i += page {
		// If the process is killed while the kernel copies a request to a page
		// that is not mapped yet, the request fails instead of being resent.
		in[i] = 1
	}
	for {
		n, err := s.dev.read(in)
		if err != nil {
			return err
		}
		if r, ok := parseRequest(in[:n]); ok {
			w.serve(&r)
		}
	}
}

func (w *worker) serve(r *request) {
	w.out.reset()
	err := error(unix.ENOSYS)
	switch r.op {
	case opForget:
		w.forget(r)
		return
	case opBatchForget:
		w.forgetMany(r)
		return
	case opInterrupt:
		w.interrupt(r)
		return
	case opRead:
		w.readFile(r)
		return
	case opDestroy, opRelease, opReleasedir: // not FLUSH, which the kernel then leaves out
		err = nil
	case opInit:
		err = w.initialize(r)
	case opStatfs:
		w.statfs()
		err = nil
	case opOpendir:
		if !w.noOpendir.Load() { // else the kernel opens and keeps directories by itself
			w.opened(openKeepCache | openCacheDir)
			err = nil
		}
	case opOpen:
		if l, ino, nerr := w.node(r.node); nerr == nil && ino == 0 {
			w.opens(l)
		}
		w.opened(openKeepCache | openNoFlush)
		err = nil
	default:
		err = w.describe(r)
	}
	if err != nil {
		w.dev.fail(r.unique, errno(err))
		return
	}
	w.dev.send(r.unique, &w.out)
}

// describe answers requests about metadata.
func (w *worker) describe(r *request) error {
	switch r.op {
	case opLookup:
		return w.lookup(r)
	case opGetattr:
		return w.getattr(r)
	case opReadlink:
		return w.readlink(r)
	case opReaddir:
		return w.readdir(r)
	case opGetxattr, opListxattr:
		return w.xattr(r)
	}
	return unix.ENOSYS
}

func errno(err error) unix.Errno {
	var n unix.Errno
	if errors.As(err, &n) {
		return n
	}
	return unix.EIO
}

// initialize answers the kernel's first request.
func (w *worker) initialize(r *request) error {
	if len(r.body) < 16 {
		return unix.EIO
	}
	major, minor, ahead := native.Uint32(r.body), native.Uint32(r.body[4:]), native.Uint32(r.body[8:])
	if major != protoMajor || minor < protoLeast {
		return unix.EPROTO
	}
	flags := uint64(native.Uint32(r.body[12:]))
	if flags&initExt != 0 && len(r.body) >= 20 {
		flags |= uint64(native.Uint32(r.body[16:])) << 32
	}
	flags &= initWanted
	w.canResend.Store(flags&initHasResend != 0)
	w.noOpendir.Store(flags&initNoOpendir != 0)
	if w.canResend.Load() {
		w.tell(message{kind: kindKernel, flags: flagResend})
	}
	for _, n := range []uint32{protoMajor, min(minor, protoMinor), ahead, uint32(flags)} {
		w.out.u32(n)
	}
	w.out.u16(maxBackground)
	w.out.u16(maxBackground) // congested never before that
	w.out.u32(page)          // of a write; decides the least buffer for requests
	w.out.u32(1)             // ns of time
	w.out.u16(maxPages)
	w.out.u16(0)
	w.out.u32(uint32(flags >> 32))
	w.out.b = append(w.out.b, make([]byte, outHeaderSize+64-len(w.out.b))...)
	return nil
}

func (w *worker) statfs() {
	for range 5 {
		w.out.u64(0)
	}
	w.out.u32(page)
	w.out.u32(255)
	w.out.u32(page)
	w.out.b = append(w.out.b, make([]byte, 28)...)
}

func (w *worker) opened(flags uint32) {
	w.out.u64(0)
	w.out.u32(flags)
	w.out.u32(0)
}

// node finds what a node number means: a layer, and the number of an inode of
// its tree or 0 for its file. The root is no layer's.
func (w *worker) node(n uint64) (*layer, uint32, error) {
	l := w.byNumber(uint32(n >> 32))
	if l == nil || uint32(n) != 0 && l.index.Load() == nil {
		return nil, 0, unix.ESTALE
	}
	return l, uint32(n), nil
}

// attrOf is what stat shows of a node.
func (w *worker) attrOf(n uint64) (attr, error) {
	if n == rootNode {
		return attr{ino: rootNode, mode: unix.S_IFDIR | 0o711, nlink: 2}, nil
	}
	l, ino, err := w.node(n)
	if err != nil {
		return attr{}, err
	}
	if ino == 0 {
		return l.fileAttr(), nil
	}
	x, err := l.index.Load().inode(ino)
	return l.treeAttr(&x), err
}

func (w *worker) getattr(r *request) error {
	a, err := w.attrOf(r.node)
	if err != nil {
		return err
	}
	w.out.u64(forever)
	w.out.u64(0)
	w.out.attr(a)
	return nil
}

func (w *worker) lookup(r *request) error {
	if r.node == rootNode {
		return w.lookupTop(r.name())
	}
	l, dir, err := w.inode(r.node)
	if err != nil {
		return err
	}
	x := l.index.Load()
	nid, err := x.lookup(&dir, r.name())
	if err == unix.ENOENT {
		w.out.entry(attr{}) // that there is none may be kept too
		return nil
	}
	if err != nil {
		return err
	}
	child, err := x.inode(nid)
	if err != nil {
		return err
	}
	w.out.entry(l.treeAttr(&child))
	return nil
}

// lookupTop looks up a layer. That there is none may change, and is not kept.
func (w *worker) lookupTop(name string) error {
	l, as := w.named(name)
	if l == nil {
		return unix.ENOENT
	}
	n := l.node(0)
	if as == asTree {
		n = l.node(l.index.Load().root)
	}
	a, err := w.attrOf(n)
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.removed {
		return unix.ENOENT
	}
	first := !l.uses[as].held()
	l.uses[as].lookups++
	if first { // before the kernel knows it itself: this process may be killed between
		w.tell(message{kind: kindHeld, id: l.id, flags: l.flags()})
	}
	w.out.entry(a)
	return nil
}

// inode finds an inode of a tree.
func (w *worker) inode(n uint64) (*layer, inode, error) {
	l, ino, err := w.node(n)
	if err != nil {
		return nil, inode{}, err
	}
	if ino == 0 {
		return nil, inode{}, unix.ENOTDIR
	}
	x, err := l.index.Load().inode(ino)
	return l, x, err
}

func (w *worker) readlink(r *request) error {
	l, x, err := w.inode(r.node)
	if err != nil {
		return err
	}
	if x.mode&unix.S_IFMT != unix.S_IFLNK {
		return unix.EINVAL
	}
	target, err := l.index.Load().link(&x)
	w.out.b = append(w.out.b, target...)
	return err
}

// readdir lists a directory. The root shows no layers: who wants one knows its name.
func (w *worker) readdir(r *request) error {
	in, ok := r.readIn()
	if !ok {
		return unix.EINVAL
	}
	if r.node == rootNode {
		if in.off == 0 {
			w.out.dirent(rootNode, 1, unix.DT_DIR, ".", in.size)
			w.out.dirent(rootNode, 2, unix.DT_DIR, "..", in.size)
		}
		return nil
	}
	l, dir, err := w.inode(r.node)
	if err != nil {
		return err
	}
	if !dir.isDir() {
		return unix.ENOTDIR
	}
	return l.index.Load().list(&dir, uint64(in.off), func(nid uint32, next uint64, typ byte, name string) bool {
		return w.out.dirent(l.node(nid), next, direntType(typ), name, in.size)
	})
}

// direntType makes of EROFS's type of an entry the one of readdir(3).
func direntType(t byte) uint32 {
	types := [...]uint32{0, unix.DT_REG, unix.DT_DIR, unix.DT_CHR, unix.DT_BLK, unix.DT_FIFO, unix.DT_SOCK,
		unix.DT_LNK}
	if int(t) < len(types) {
		return types[t]
	}
	return 0
}

// xattr answers GETXATTR and LISTXATTR.
func (w *worker) xattr(r *request) error {
	if len(r.body) < 8 {
		return unix.EINVAL
	}
	size := int(native.Uint32(r.body))
	r.body = r.body[8:]
	value, err := w.xattrValue(r)
	if err != nil {
		return err
	}
	switch {
	case size == 0:
		w.out.u32(uint32(len(value)))
		w.out.u32(0)
	case len(value) > size:
		return unix.ERANGE
	default:
		w.out.b = append(w.out.b, value...)
	}
	return nil
}

// xattrValue is the value of the attribute, or the list of all names.
func (w *worker) xattrValue(r *request) ([]byte, error) {
	list := r.op == opListxattr
	l, ino, err := w.node(r.node)
	if err != nil || ino == 0 {
		return nil, noAttr(list)
	}
	x := l.index.Load()
	n, err := x.inode(ino)
	if err != nil {
		return nil, err
	}
	var out []byte
	found := list
	want := ""
	if !list {
		want = r.name()
	}
	err = x.attrs(&n, func(name string, value []byte) bool {
		if list {
			out = append(append(out, name...), 0)
		} else if name == want {
			out, found = value, true
		}
		return list || !found
	})
	if err == nil && !found {
		err = unix.ENODATA
	}
	return out, err
}

// noAttr is the error for a node without attributes.
func noAttr(list bool) error {
	if list {
		return nil
	}
	return unix.ENODATA
}

func (w *worker) forget(r *request) {
	if len(r.body) >= 8 {
		w.forgotten(r.node, native.Uint64(r.body))
	}
}

func (w *worker) forgetMany(r *request) {
	if len(r.body) < 8 {
		return
	}
	for b := r.body[8:]; len(b) >= 16; b = b[16:] {
		w.forgotten(native.Uint64(b), native.Uint64(b[8:]))
	}
}

// forgotten records that the kernel has dropped a node. It does that once and
// for all lookups, and to a directory after all that is in it.
func (w *worker) forgotten(node, lookups uint64) {
	l := w.byNumber(uint32(node >> 32))
	if l == nil {
		return
	}
	as := asFile
	if ino := uint32(node); ino != 0 {
		x := l.index.Load()
		if x == nil || ino != x.root {
			return
		}
		as = asTree
	}
	l.mu.Lock()
	u := &l.uses[as]
	u.lookups = max(0, u.lookups-int64(lookups))
	u.before = false
	if !u.held() {
		w.tell(message{kind: kindHeld, id: l.id, flags: l.flags()})
	}
	l.mu.Unlock()
	w.drop(l)
}

// readFile answers READ, or leaves it to who brings the bytes.
func (w *worker) readFile(q *request) {
	in, ok := q.readIn()
	l, ino, err := w.node(q.node)
	if err == nil && !ok {
		err = unix.EINVAL
	}
	if err == nil {
		w.parts, err = l.parts(w.parts[:0], ino, in)
	}
	if err != nil {
		w.dev.fail(q.unique, errno(err))
		return
	}
	r := read{unique: q.unique, pid: q.pid, parts: w.parts, sticky: in.flags&unix.O_DIRECT != 0}
	for _, p := range r.parts {
		r.size += p.n
	}
	if r.size <= page {
		l.single(&r)
	}
	if l.ready(&r) {
		w.answer(l, &r, w.buf)
		return
	}
	w.waitFor(l, &r)
}

// parts says where what a READ asks for lies.
func (l *layer) parts(out []part, ino uint32, in readIn) ([]part, error) {
	if ino == 0 {
		if n := min(int64(in.size), l.size()-in.off); n > 0 {
			out = append(out, part{fromData, in.off, int(n)})
		}
		return out, nil
	}
	x := l.index.Load()
	node, err := x.inode(ino)
	if err != nil {
		return nil, err
	}
	if node.mode&unix.S_IFMT != unix.S_IFREG {
		return nil, unix.EINVAL
	}
	return x.parts(out, &node, in.off, in.size)
}

// waitFor puts a read that lacks bytes on the list of its layer.
func (w *worker) waitFor(l *layer, r *read) {
	own := *r
	own.parts = append([]part(nil), r.parts...)
	wants, refuse, done := l.wait(&own)
	switch {
	case refuse:
		w.dev.fail(r.unique, unix.EIO)
	case done:
		w.answer(l, &own, w.buf)
	default:
		w.tellWants(l, wants)
		w.signals.waiting(l, own.unique)
	}
}
