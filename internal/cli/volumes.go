package cli

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"dewpoint/internal/api"
	"dewpoint/internal/config"
	"dewpoint/internal/spec"
)

// parseVolume reads SOURCE:TARGET[:ro|rw]. A source without a slash is the name of a volume, a relative path
// is one of the current directory.
func parseVolume(s string) (spec.Volume, error) {
	parts := strings.Split(s, ":")
	if len(parts) < 2 || len(parts) > 3 || parts[0] == "" {
		return spec.Volume{}, fmt.Errorf("want SOURCE:TARGET[:ro], where SOURCE is a path, such as ./data, or the name of a volume")
	}
	v := spec.Volume{Source: parts[0], Target: parts[1]}
	if len(parts) == 3 {
		if parts[2] != "ro" && parts[2] != "rw" {
			return v, fmt.Errorf("%q is not ro or rw: dewd labels nothing for SELinux, copies what the image has, and keeps mounts private", parts[2])
		}
		v.ReadOnly = parts[2] == "ro"
	}
	if v.Source != "." && v.Source != ".." && !strings.Contains(v.Source, "/") {
		return v, nil
	}
	var err error
	v.Source, err = filepath.Abs(v.Source)
	return v, err
}

// parseMount reads type=bind|volume|tmpfs,KEY=VALUE,…, and adds that to the request.
func parseMount(r *spec.Request, s string) error {
	kind, v, t := "volume", spec.Volume{}, spec.Tmpfs{}
	for _, pair := range strings.Split(s, ",") {
		key, value, has := strings.Cut(pair, "=")
		switch key {
		case "type":
			kind = value
		case "source", "src":
			v.Source = value
		case "target", "destination", "dst":
			v.Target, t.Target = value, value
		case "readonly", "ro":
			if v.ReadOnly = !has || value == "true" || value == "1"; v.ReadOnly {
				t.Options = append(t.Options, "ro")
			}
		case "tmpfs-size":
			n, err := config.ParseSize(value)
			if err != nil {
				return err
			}
			t.Options = append(t.Options, fmt.Sprintf("size=%d", n))
		case "tmpfs-mode":
			t.Options = append(t.Options, "mode="+value)
		default:
			return fmt.Errorf("%q is not a key of it; there are type, source, target, readonly, tmpfs-size and tmpfs-mode", key)
		}
	}
	switch kind {
	case "bind":
		if v.Source == "" {
			return fmt.Errorf("a bind mount has a source, a path of the host")
		}
		source, err := filepath.Abs(v.Source)
		if err != nil {
			return err
		}
		v.Source = source
		r.Volumes = append(r.Volumes, v)
	case "volume":
		if !spec.ValidVolume(v.Source) {
			return fmt.Errorf("%q is not the name of a volume; of the host's paths say type=bind", v.Source)
		}
		r.Volumes = append(r.Volumes, v)
	case "tmpfs":
		r.Tmpfs = append(r.Tmpfs, t)
	default:
		return fmt.Errorf("type %q: want bind, volume or tmpfs", kind)
	}
	return nil
}

func volumeFlags(c *call) {
	c.flags.BoolVarP(&c.opt.force, "force", "f", false, "prune: do remove them")
}

// volumeVerbs are what "dew volume" does.
var volumeVerbs = map[string]func(context.Context, *call) error{"ls": volumeList, "create": volumeCreate,
	"inspect": volumeInspect, "rm": volumeRemove, "prune": volumePrune}

func volume(ctx context.Context, c *call) error {
	if len(c.args) == 0 || volumeVerbs[c.args[0]] == nil {
		return misuse(c, "say what to do: ls, create, inspect, rm or prune")
	}
	verb := c.args[0]
	c.args = c.args[1:]
	if verb != "prune" && c.opt.force {
		return misuse(c, "--force is for volume prune")
	}
	return volumeVerbs[verb](ctx, c)
}

func volumeList(ctx context.Context, c *call) error {
	if err := c.none(); err != nil {
		return err
	}
	all, err := c.client.Volumes(ctx)
	if err != nil {
		return err
	}
	if c.json {
		return list(c, all)
	}
	var rows [][]string
	for _, v := range all {
		rows = append(rows, []string{v.Name, dash(strings.Join(v.Containers, ",")), v.Path})
	}
	return table(c.cfg.Stdout, "VOLUME CONTAINERS PATH", rows)
}

func volumeCreate(ctx context.Context, c *call) error {
	return c.names("volume", func(name string) error { return c.client.MakeVolume(ctx, name) })
}

func volumeInspect(ctx context.Context, c *call) error {
	all, err := c.client.Volumes(ctx)
	if err != nil {
		return err
	}
	return c.each("volume", func(name string) error {
		i := slices.IndexFunc(all, func(v spec.VolumeInfo) bool { return v.Name == name })
		if i < 0 {
			return noVolume(name)
		}
		return c.print(all[i])
	})
}

func volumeRemove(ctx context.Context, c *call) error {
	return c.names("volume", func(name string) error { return c.client.RemoveVolume(ctx, name) })
}

// volumePrune removes the volumes that no container has. Nobody gets their contents back: --force is needed.
func volumePrune(ctx context.Context, c *call) error {
	if err := c.none(); err != nil {
		return err
	}
	all, err := c.client.Volumes(ctx)
	if err != nil {
		return err
	}
	var unused []string
	for _, v := range all {
		if len(v.Containers) == 0 {
			unused = append(unused, v.Name)
		}
	}
	if len(unused) == 0 {
		return nil
	}
	if !c.opt.force {
		return misuse(c, "no container has %s: say --force to remove them with all that is in them",
			strings.Join(unused, ", "))
	}
	c.args = unused
	return volumeRemove(ctx, c)
}

func noVolume(name string) error {
	return api.New(api.NotFound, fmt.Sprintf("there is no such volume: %s", name))
}
