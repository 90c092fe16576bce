package treetest

import (
	"fmt"
	"strings"
)

// Segment is a run of a sparse file that an archive holds.
type Segment struct {
	Off  int64
	Data string
}

// Sparse is a sparse file.
type Sparse struct {
	Name string
	Size int64
	Segs []Segment
}

func (s *Sparse) stored() string {
	var b strings.Builder
	for _, g := range s.Segs {
		b.WriteString(g.Data)
	}
	return b.String()
}

// Expanded is the file with its holes.
func (s *Sparse) Expanded() string {
	b := make([]byte, s.Size)
	for _, g := range s.Segs {
		copy(b[g.Off:], g.Data)
	}
	return string(b)
}

// GNU appends the file in the old GNU format.
func (a *Archive) GNU(s Sparse) *Archive {
	r := Raw{Name: s.Name, Mode: "0000644", Mtime: "13712345670", Magic: MagicGNU, Type: 'S',
		At: map[int]string{}}
	stored := s.stored()
	r.Size = fmt.Sprintf("%011o", len(stored))
	r.At[483] = fmt.Sprintf("%011o", s.Size)
	segs := s.Segs
	for i := 0; i < 4 && len(segs) > 0; i++ {
		r.At[386+24*i] = gnuSegment(segs[0])
		segs = segs[1:]
	}
	if len(segs) > 0 {
		r.At[482] = "\x01"
	}
	a.Raw(r, "")
	for len(segs) > 0 {
		b := make([]byte, 512)
		for i := 0; i < 21 && len(segs) > 0; i++ {
			copy(b[24*i:], gnuSegment(segs[0]))
			segs = segs[1:]
		}
		if len(segs) > 0 {
			b[504] = 1
		}
		a.Body(string(b))
	}
	return a.Body(stored)
}

func gnuSegment(g Segment) string { return fmt.Sprintf("%011o\x00%011o\x00", g.Off, len(g.Data)) }

// PAXSparse appends the file in PAX sparse format 0.0, 0.1 or 1.0.
func (a *Archive) PAXSparse(version string, s Sparse) *Archive {
	stored, size := s.stored(), fmt.Sprint(s.Size)
	var pairs, list []string
	one := fmt.Sprintf("%d\n", len(s.Segs))
	for _, g := range s.Segs {
		pairs = append(pairs, "GNU.sparse.offset", fmt.Sprint(g.Off), "GNU.sparse.numbytes",
			fmt.Sprint(len(g.Data)))
		list = append(list, fmt.Sprint(g.Off), fmt.Sprint(len(g.Data)))
		one += fmt.Sprintf("%d\n%d\n", g.Off, len(g.Data))
	}
	name := s.Name
	switch version {
	case "0.0":
		a.PAX('x', append([]string{"GNU.sparse.size", size, "GNU.sparse.numblocks", fmt.Sprint(len(s.Segs))},
			pairs...)...)
	case "0.1":
		a.PAX('x', "GNU.sparse.size", size, "GNU.sparse.numblocks", fmt.Sprint(len(s.Segs)),
			"GNU.sparse.map", strings.Join(list, ","), "GNU.sparse.name", s.Name)
		name = "GNUSparseFile.0/x"
	case "1.0":
		a.PAX('x', "GNU.sparse.major", "1", "GNU.sparse.minor", "0", "GNU.sparse.name", s.Name,
			"GNU.sparse.realsize", size)
		stored = one + string(make([]byte, -len(one)&511)) + stored
		name = "GNUSparseFile.0/x"
	}
	return a.Raw(Raw{Name: name, Mode: "0000644", Mtime: "13712345670", Magic: MagicUstar, Type: '0'}, stored)
}

// SparseFiles are files with holes in various places.
func SparseFiles() []Sparse {
	var many []Segment
	for i := range int64(60) {
		many = append(many, Segment{i * 8192, Text(4096)})
	}
	return []Sparse{
		{"front", 1 << 20, []Segment{{0, Text(4096)}}},
		{"back", 1<<20 + 100, []Segment{{1 << 20, Text(100)}}},
		{"both", 300_000, []Segment{{0, Text(512)}, {299_008, Text(992)}}},
		{"hole", 70_000, nil},
		{"hole with end", 70_000, []Segment{{70_000, ""}}},
		{"many", 500_000, many},
		{"odd", 100_000, []Segment{{10, Text(100)}, {5000, Text(1)}, {99_000, Text(777)}}},
		{"touching", 8192, []Segment{{0, Text(1000)}, {1000, Text(24)}, {2048, Text(512)}}},
		{"middle", 3 << 20, []Segment{{1 << 20, Text(1 << 20)}}},
		{"full", 5000, []Segment{{0, Text(5000)}}},
		{"empty", 0, nil},
	}
}

func sparseCases() []Case {
	cases := []Case{{Name: "sparse GNU", Own: "containerd refuses it"}}
	var gnu, plain Archive
	for _, s := range SparseFiles() {
		gnu.GNU(s)
		plain.Raw(Raw{Name: s.Name, Mode: "0000644", Mtime: "13712345670", Magic: MagicGNU, Type: '0'},
			s.Expanded())
	}
	cases[0].Tar, cases[0].Same = gnu.Bytes(), plain.Bytes()
	for _, v := range []string{"0.0", "0.1", "1.0"} {
		var a Archive
		for _, s := range SparseFiles() {
			if v != "1.0" && s.Segs == nil {
				continue // cannot be told from a file without a map
			}
			a.PAXSparse(v, s)
		}
		cases = append(cases, Case{Name: "sparse PAX " + v, Tar: a.Bytes()})
	}
	return cases
}
