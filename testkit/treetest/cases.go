package treetest

import (
	"archive/tar"
	"encoding/binary"
	"fmt"
	"strings"
	"time"
)

// Case is a layer, and perhaps one below it.
type Case struct {
	Name  string
	Tar   []byte
	Lower []byte // the layer below, nil if the case needs none
	// Own says why containerd's applier cannot be the measure: it refuses the
	// layer, or gives a result that depends on the order of entries. Then Same
	// is a layer that it takes and that has to give the same tree.
	Own  string
	Same []byte
	// Implied are directories that the layer has without an entry: containerd
	// gives them the current time.
	Implied []string
}

// Skip is what cannot be compared of the case with the result of containerd's
// applier: times of directories that it made by itself; the root, which it
// leaves alone; and link counts of whiteouts, which may share an inode.
func (c *Case) Skip(t Tree) func(path, field string) bool {
	implied := map[string]bool{".": true}
	for _, p := range c.Implied {
		implied[p] = true
	}
	return func(path, field string) bool {
		switch {
		case path == ".":
			return field != "" && field != "xattr.trusted.overlay.opaque"
		case field == "mtime" && implied[path]:
			return true
		}
		return t[path]["rdev"] == "0:0" &&
			(field == "nlink" || field == "same" || field == "mtime" || field == "owner" || field == "mode")
	}
}

// Cases are the layers that every way to mount one has to show alike.
func Cases() []Case {
	all := []Case{
		{Name: "kinds", Tar: kinds()},
		{Name: "attributes", Tar: attributes()},
		{Name: "xattrs", Tar: xattrCase()},
		{Name: "capabilities", Tar: capabilities()},
		{Name: "acls", Tar: acls()},
		{Name: "names", Tar: names()},
		{Name: "formats", Tar: formats()},
		{Name: "hard links", Tar: hardLinks()},
		{Name: "replaced", Tar: replaced()},
		{Name: "implied", Tar: implied(), Implied: []string{"a", "a/b", "x", "x/y", "x/y/z"}},
		{Name: "symlinks", Tar: symlinks()},
		{Name: "devices", Tar: devices()},
		{Name: "sizes", Tar: sizes()},
		{Name: "big directory", Tar: bigDirectory(3000)},
		{Name: "long names in directories", Tar: longNames()},
		{Name: "empty", Tar: (&Archive{}).Bytes()},
		{Name: "global header", Tar: globalHeader()},
	}
	all = append(all, whiteoutCases()...)
	return append(all, sparseCases()...)
}

func kinds() []byte {
	var a Archive
	a.Add(tar.Header{Name: "./", Typeflag: tar.TypeDir, Mode: 0o711, Uid: 3, Gid: 4}, "")
	a.Dir("dir").File("dir/file", "hello\n").File("dir/empty", "").Dir("dir/sub")
	a.Symlink("dir/link", "file").Link("dir/hard", "dir/file")
	a.Add(tar.Header{Name: "fifo", Typeflag: tar.TypeFifo, Mode: 0o600, Uid: 1}, "")
	a.Add(tar.Header{Name: "null", Typeflag: tar.TypeChar, Mode: 0o666, Devmajor: 1, Devminor: 3}, "")
	a.Add(tar.Header{Name: "disk", Typeflag: tar.TypeBlock, Mode: 0o660, Gid: 6, Devmajor: 8, Devminor: 1}, "")
	return a.Bytes()
}

func attributes() []byte {
	var a Archive
	for i, m := range []int64{0o4755, 0o2755, 0o6711, 0o1000, 0o777, 0o7777, 0o001} {
		a.Add(tar.Header{Name: fmt.Sprintf("mode%d", i), Mode: m}, "x")
		a.Add(tar.Header{Name: fmt.Sprintf("dir%d", i), Typeflag: tar.TypeDir, Mode: m}, "")
	}
	a.Add(tar.Header{Name: "high", Uid: 100_000, Gid: 4_000_000_000}, "")
	a.Add(tar.Header{Name: "highlink", Typeflag: tar.TypeSymlink, Linkname: "x", Uid: 70_000, Gid: 70_001}, "")
	for i, t := range []time.Time{
		time.Unix(1_234_567_890, 123_456_789), time.Unix(0, 1), time.Unix(-5, 0), time.Unix(1<<33, 999_999_999),
		time.Unix(1<<34, 0),
	} {
		a.Add(tar.Header{Name: fmt.Sprintf("time%d", i), ModTime: t, Format: tar.FormatPAX}, "")
		a.Add(tar.Header{Name: fmt.Sprintf("timedir%d", i), Typeflag: tar.TypeDir, ModTime: t,
			Format: tar.FormatPAX}, "")
		a.Add(tar.Header{Name: fmt.Sprintf("timelink%d", i), Typeflag: tar.TypeSymlink, Linkname: "x", ModTime: t,
			Format: tar.FormatPAX}, "")
	}
	return a.Bytes()
}

func withXattrs(pairs ...string) map[string]string {
	m := map[string]string{}
	for i := 0; i < len(pairs); i += 2 {
		m["SCHILY.xattr."+pairs[i]] = pairs[i+1]
	}
	return m
}

func xattrCase() []byte {
	var a Archive
	add := func(name string, typ byte, pairs ...string) {
		h := tar.Header{Name: name, Typeflag: typ, PAXRecords: withXattrs(pairs...)}
		if typ == tar.TypeSymlink {
			h.Linkname = "target"
		}
		a.Add(h, "")
	}
	add("one", tar.TypeReg, "user.one", "1")
	add("binary", tar.TypeReg, "user.binary", "a\x00b\n=c\xff")
	add("many", tar.TypeReg, "user.a", "1", "user.b", "22", "security.foo", "bar",
		"user."+strings.Repeat("n", 250), "long")
	add("large", tar.TypeReg, "user.large", strings.Repeat("v", 1500))
	add("dir", tar.TypeDir, "user.dir", "d", "user.shared", "same value here")
	add("trusted", tar.TypeReg, "trusted.foo", "dropped", "user.kept", "kept")
	add("opaque", tar.TypeDir, "trusted.overlay.opaque", "y", "trusted.overlay.redirect", "/etc")
	add("link", tar.TypeSymlink, "user.link", "dropped", "security.link", "kept")
	add("fifo", tar.TypeFifo, "user.fifo", "dropped", "security.fifo", "kept")
	add("foreign", tar.TypeReg, "com.apple.x", "dropped", "system.foo", "dropped", "user.kept", "k")
	for i := range 40 {
		add(fmt.Sprintf("shared%02d", i), tar.TypeReg, "user.shared", "same value here", "user.i", fmt.Sprint(i%3))
	}
	add("emptyvalue", tar.TypeReg, "user.empty", "")
	a.Add(tar.Header{Name: "libarchive", PAXRecords: map[string]string{"LIBARCHIVE.xattr.user.x": "eA=="}}, "")
	// A directory's second entry adds attributes and replaces values.
	add("dir", tar.TypeDir, "user.dir", "new", "user.more", "m")
	return a.Bytes()
}

const netRaw = "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"

func capabilities() []byte {
	var a Archive
	caps := withXattrs("security.capability", netRaw)
	for _, n := range []string{"ping", "lost", "kept"} {
		a.Add(tar.Header{Name: n, Mode: 0o755, Uid: 5, PAXRecords: caps}, "binary")
	}
	a.Link("lost.link", "lost")
	a.Add(tar.Header{Name: "kept.link", Typeflag: tar.TypeLink, Linkname: "kept", PAXRecords: caps}, "")
	return a.Bytes()
}

// ACL encodes a list of tag, permissions and id.
func ACL(entries ...[3]uint32) string {
	b := binary.LittleEndian.AppendUint32(nil, 2)
	for _, e := range entries {
		b = binary.LittleEndian.AppendUint16(b, uint16(e[0]))
		b = binary.LittleEndian.AppendUint16(b, uint16(e[1]))
		b = binary.LittleEndian.AppendUint32(b, e[2])
	}
	return string(b)
}

func acls() []byte {
	const none = 1<<32 - 1
	named := ACL([3]uint32{1, 7, none}, [3]uint32{2, 6, 1000}, [3]uint32{4, 5, none}, [3]uint32{8, 4, 77},
		[3]uint32{16, 6, none}, [3]uint32{32, 1, none})
	plain := ACL([3]uint32{1, 6, none}, [3]uint32{4, 4, none}, [3]uint32{32, 4, none})
	masked := ACL([3]uint32{1, 6, none}, [3]uint32{4, 4, none}, [3]uint32{16, 4, none}, [3]uint32{32, 4, none})
	var a Archive
	add := func(name string, typ byte, mode int64, pairs ...string) {
		a.Add(tar.Header{Name: name, Typeflag: typ, Mode: mode, PAXRecords: withXattrs(pairs...)}, "")
	}
	add("agrees", tar.TypeReg, 0o761, "system.posix_acl_access", named)
	add("differs", tar.TypeReg, 0o640, "system.posix_acl_access", named)
	add("plain", tar.TypeReg, 0o755, "system.posix_acl_access", plain)
	add("masked", tar.TypeReg, 0o611, "system.posix_acl_access", masked)
	add("dir", tar.TypeDir, 0o750, "system.posix_acl_access", named, "system.posix_acl_default", named)
	return a.Bytes()
}

func names() []byte {
	var a Archive
	long := strings.Repeat("n", 255)
	a.Dir("./dotted").File("./dotted/file", "1").File("/absolute", "2").File("a//b/./c", "3").Dir("a").Dir("a/b")
	a.File("up/../down", "4").Dir(long).File(long+"/"+long, "5")
	a.File("sp ace\ttab\nnewline", "6").File("ünïcödé", "7").File("bin\xff\xfe\x80", "8").File("\x01", "9")
	deep := "deep"
	for i := range 30 {
		a.Dir(deep)
		deep += fmt.Sprintf("/%s%d", strings.Repeat("d", 40), i)
	}
	a.File(deep, "bottom")
	for _, n := range []string{"!", "+", "-", "...", "..a", ".a", "0", "A", "~"} {
		a.File(n, n)
	}
	a.File(".wh", "no whiteout").File("wh.x", "none either")
	return a.Bytes()
}

func formats() []byte {
	var a Archive
	v7 := Raw{Mode: "0000644", UID: "0000001", GID: "0000002", Mtime: "13712345670"}
	with := func(name string, typ byte, magic string, at map[int]string) Raw {
		r := v7
		r.Name, r.Type, r.Magic, r.At = name, typ, magic, at
		return r
	}
	a.Raw(with("v7", 0, "", nil), "seven").Raw(with("v7dir/", 0, "", nil), "")
	a.Raw(with("ustar", '0', MagicUstar, nil), "ustar")
	r := with("name", '0', MagicUstar, nil)
	r.Prefix = "v7dir"
	a.Raw(r, "prefixed")
	a.Raw(with("gnu", '0', MagicGNU, nil), "gnu")
	long := "v7dir/" + strings.Repeat("l", 200)
	a.Raw(with("././@LongLink", 'L', MagicGNU, nil), long+"\x00").Raw(with("cut", '0', MagicGNU, nil),
		"long name")
	a.Raw(with("././@LongLink", 'K', MagicGNU, nil), strings.Repeat("t", 300)+"\x00")
	a.Raw(with("longlink", '2', MagicGNU, nil), "")
	a.Raw(with("././@LongLink", 'K', MagicGNU, nil), long+"\x00").Raw(with("hardlong", '1', MagicGNU, nil), "")
	r = with("base256", '0', MagicGNU, nil)
	r.UID, r.GID, r.Mtime = Base256(3_000_000, 8), Base256(3_000_001, 8), Base256(1<<33+5, 12)
	a.Raw(r, "big numbers")
	a.PAX('x', "path", "fromrecords", "uid", "2097152", "gid", "2097153", "mtime", "1500000000.5", "size", "3",
		"comment", "no")
	r = with("ignored", '0', MagicUstar, nil)
	r.Size = "00000000000"
	a.Raw(r, "").Body("abc")
	a.PAX('x', "path", "", "mtime", "1500000000.123456789123")
	a.Raw(with("kept", '0', MagicUstar, nil), "k")
	a.PAX('x', "linkpath", "records").Raw(with("paxlink", '2', MagicUstar, nil), "")
	r = with("spaces", '0', MagicUstar, nil)
	r.Mode, r.Size = "   644 ", "          5 "
	a.Raw(r, "space")
	return a.Bytes()
}

func hardLinks() []byte {
	var a Archive
	a.Dir("d").File("d/one", "same").Link("d/two", "d/one").Link("three", "./d/two").Link("four", "/d/one")
	a.Add(tar.Header{Name: "attr", Mode: 0o600, Uid: 1, PAXRecords: withXattrs("user.a", "1")}, "x")
	a.Add(tar.Header{Name: "attr2", Typeflag: tar.TypeLink, Linkname: "attr", Mode: 0o4755, Uid: 7, Gid: 8,
		ModTime: time.Unix(1_700_000_000, 5), PAXRecords: withXattrs("user.b", "2")}, "")
	a.File("old", "kept by its other name").Link("other", "old").File("old", "new")
	a.Symlink("sym", "d/one").Link("symtwo", "sym")
	a.Add(tar.Header{Name: "pipe", Typeflag: tar.TypeFifo}, "").Link("pipetwo", "pipe")
	a.File("victim", "v").Link("victim", "d/one").File("d/two", "own again")
	return a.Bytes()
}

func replaced() []byte {
	var a Archive
	a.File("file", "1").File("file", "22").File("file", "")
	a.Dir("dir").File("dir/a", "a").Dir("dir/sub").File("dir/sub/b", "b")
	a.File("f2d", "x").Dir("f2d").File("f2d/in", "i")
	a.Dir("d2s").File("d2s/gone", "g").Symlink("d2s", "dir")
	a.Symlink("s2d", "dir").Dir("s2d").File("s2d/own", "o")
	a.Symlink("s2f", "dir/a").File("s2f", "no write through")
	a.Add(tar.Header{Name: "dir", Typeflag: tar.TypeDir, Mode: 0o1777, Uid: 9, ModTime: time.Unix(77, 7)}, "")
	a.Dir("twice").File("twice/kept", "k").Dir("twice").File("twice/more", "m")
	return a.Bytes()
}

func implied() []byte {
	var a Archive
	a.File("a/b/file", "1").File("a/b2", "2").File("x/y/z/w", "3")
	a.Add(tar.Header{Name: "late", Typeflag: tar.TypeDir, Mode: 0o700}, "")
	a.File("later/file", "f").Add(tar.Header{Name: "later", Typeflag: tar.TypeDir, Mode: 0o700, Uid: 5}, "")
	return a.Bytes()
}

func symlinks() []byte {
	var a Archive
	for _, n := range []int{1, 59, 60, 100, 400, 440, 447, 448, 449, 470, 511, 512, 513, 1000, 4095} {
		a.Symlink(fmt.Sprintf("to%d", n), strings.Repeat("t", n))
	}
	return a.Symlink("up", "../../../etc").Symlink("abs", "/etc/passwd").Symlink("bin", "\xff\xfe").Bytes()
}

func devices() []byte {
	var a Archive
	for i, d := range [][2]int64{{1, 3}, {255, 255}, {256, 256}, {4095, 1<<20 - 1}, {10, 1000}, {0, 1}, {1, 0}} {
		a.Add(tar.Header{Name: fmt.Sprintf("c%d", i), Typeflag: tar.TypeChar, Devmajor: d[0], Devminor: d[1]}, "")
		a.Add(tar.Header{Name: fmt.Sprintf("b%d", i), Typeflag: tar.TypeBlock, Devmajor: d[0], Devminor: d[1],
			Mode: 0o4640, Uid: 3}, "")
	}
	return a.Bytes()
}

// Text is n bytes that tell where they stand.
func Text(n int) string {
	var b strings.Builder
	for b.Len() < n {
		fmt.Fprintf(&b, "%08x\n", b.Len())
	}
	return b.String()[:n]
}

func sizes() []byte {
	var a Archive
	for _, n := range []int{0, 1, 511, 512, 513, 1023, 1024, 4095, 4096, 4097, 65535, 65536, 70001, 1 << 20,
		3<<20 + 5} {
		a.File(fmt.Sprintf("size%d", n), Text(n))
	}
	return a.Bytes()
}

func bigDirectory(n int) []byte {
	var a Archive
	a.Dir("big")
	for i := range n {
		a.File(fmt.Sprintf("big/%x", uint32(i)*2654435761), "")
	}
	return a.Bytes()
}

func longNames() []byte {
	var a Archive
	for n := 1; n <= 40; n++ {
		dir := fmt.Sprintf("dir%02d", n)
		a.Dir(dir)
		for i := range n {
			a.File(fmt.Sprintf("%s/%02d%s", dir, i, strings.Repeat("x", (i*37+n*11)%254)), "")
		}
	}
	return a.Bytes()
}

func globalHeader() []byte {
	var a Archive
	a.PAX('g', "comment", "a commit", "mtime", "5", "uid", "7").File("file", "not owned by 7")
	return a.Bytes()
}

func whiteoutCases() []Case {
	lower := new(Archive)
	lower.Dir("etc").File("etc/passwd", "root").File("etc/group",
		"wheel").Dir("var").Dir("var/cache").File("var/cache/x", "x")
	lower.Dir("var/lib").File("var/lib/y", "y").File("top", "t").Symlink("sym",
		"etc").Dir("gone").File("gone/file", "f")
	below := lower.Bytes()

	files := new(Archive).Dir("etc").File("etc/.wh.passwd", "").File("etc/new", "n").File(".wh.gone",
		"").File(".wh.sym", "")
	opaque := new(Archive).Dir("var").Dir("var/cache").File("var/cache/.wh..wh..opq", "").File("var/cache/z",
		"z")
	early := new(Archive).File("var/lib/.wh..wh..opq", "").Dir("var").Dir("var/lib").File("var/lib/z", "z")
	again := new(Archive).File(".wh.top", "").File("top", "new")
	meta := new(Archive).File(".wh..wh.aufs", "").File("file", "f")
	after := new(Archive).File("top", "new").File(".wh.top", "").Dir("gone").File("gone/own",
		"o").File(".wh.gone", "")
	before := new(Archive).File(".wh.gone", "").Dir("gone").File("gone/own", "o").File("top", "new")
	hidden := new(Archive).File("top", "new").Dir("gone").File("gone/own", "o").File("gone/.wh..wh..opq",
		"").Bytes()
	return []Case{
		{Name: "whiteouts", Tar: files.Bytes(), Lower: below},
		{Name: "opaque", Tar: opaque.Bytes(), Lower: below},
		{Name: "opaque before its directory", Tar: early.Bytes(), Lower: below},
		{Name: "whiteout then file", Tar: again.Bytes(), Lower: below},
		{Name: "aufs files", Tar: meta.Bytes(), Lower: below, Own: "containerd leaves a whiteout of .wh.aufs",
			Same: new(Archive).File("file", "f").Bytes()},
		{Name: "whiteout after its name", Tar: after.Bytes(), Lower: below, Own: "containerd refuses it",
			Same: hidden},
		{Name: "whiteout before its directory", Tar: before.Bytes(), Lower: below,
			Own: "containerd shows what is below under overlayfs, and not without", Same: hidden},
	}
}
