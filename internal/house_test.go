package internal

import (
	"bufio"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

// The rules of the house that a machine can hold.
const (
	maxMethods = 40    // of a type; aim at 25
	maxLines   = 5_000 // of a package, tests left out
	maxModel   = 30    // lines of a package's comment
	maxColumns = 110   // of a line that is not a text in quotes; a tab is one
)

// tree is every Go file of the project, by its path from the root, but for generated ones.
func tree(t *testing.T) (map[string]*ast.File, *token.FileSet) {
	t.Helper()
	files, set := map[string]*ast.File{}, token.NewFileSet()
	err := filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && (d.Name() == ".git" || d.Name() == "gen" || d.Name() == "bin") {
			return fs.SkipDir
		}
		if filepath.Ext(path) != ".go" {
			return nil
		}
		f, err := parser.ParseFile(set, path, nil, parser.ParseComments)
		files[strings.TrimPrefix(path, "../")] = f
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return files, set
}

func isProduct(path string) bool {
	return !strings.HasSuffix(path, "_test.go") &&
		(strings.HasPrefix(path, "internal/") || strings.HasPrefix(path, "cmd/"))
}

func TestSizes(t *testing.T) {
	methods, lines := map[string]int{}, map[string]int{}
	files, _ := tree(t)
	for path, f := range files {
		if !isProduct(path) {
			continue
		}
		dir := strings.TrimPrefix(filepath.Dir(path), "internal/")
		lines[dir] += lineCount(t, path)
		for _, d := range f.Decls {
			if d, ok := d.(*ast.FuncDecl); ok && d.Recv != nil {
				methods[dir+"."+receiver(d.Recv.List[0].Type)]++
			}
		}
	}
	check := func(sizes map[string]int, limit int, what string) {
		for _, name := range slices.Sorted(maps.Keys(sizes)) {
			if n := sizes[name]; n > limit {
				t.Errorf("%s has %d %s, more than %d: take it apart", name, n, what, limit)
			}
		}
	}
	check(methods, maxMethods, "methods")
	check(lines, maxLines, "lines")
}

// receiver is the name of a method's type.
func receiver(e ast.Expr) string {
	for {
		switch x := e.(type) {
		case *ast.StarExpr:
			e = x.X
		case *ast.IndexExpr:
			e = x.X
		case *ast.Ident:
			return x.Name
		default:
			return ""
		}
	}
}

func lineCount(t *testing.T, path string) int {
	b, err := os.ReadFile("../" + path)
	if err != nil {
		t.Fatal(err)
	}
	return strings.Count(string(b), "\n")
}

// Each package of the product opens with what it is, its model, in few lines.
func TestPackagesHaveModels(t *testing.T) {
	documented := map[string]bool{}
	files, _ := tree(t)
	for path, f := range files {
		if isProduct(path) {
			dir := filepath.Dir(path)
			documented[dir] = documented[dir] || f.Doc != nil
			if f.Doc != nil && len(f.Doc.List) > maxModel {
				t.Errorf("%s: the package comment has %d lines, more than %d", path, len(f.Doc.List), maxModel)
			}
		}
	}
	for dir, has := range documented {
		if !has {
			t.Errorf("%s has no package comment", dir)
		}
	}
}

func TestColumns(t *testing.T) {
	files, set := tree(t)
	for path, f := range files {
		texts := literals(set, f)
		r, err := os.Open("../" + path)
		if err != nil {
			t.Fatal(err)
		}
		s := bufio.NewScanner(r)
		for n := 1; s.Scan(); n++ {
			if w := utf8.RuneCountInString(s.Text()); w > maxColumns && !texts(n) {
				t.Errorf("%s:%d has %d columns, more than %d", path, n, w, maxColumns)
			}
		}
		r.Close()
	}
}

// literals reports whether a line of the file belongs to a text of several lines.
func literals(set *token.FileSet, f *ast.File) func(line int) bool {
	texts := map[int]bool{}
	ast.Inspect(f, func(n ast.Node) bool {
		if l, ok := n.(*ast.BasicLit); ok && l.Kind == token.STRING {
			for line := set.Position(l.Pos()).Line; line <= set.Position(l.End()).Line; line++ {
				texts[line] = true
			}
		}
		return true
	})
	return func(line int) bool { return texts[line] }
}
