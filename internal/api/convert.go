package api

import (
	"math"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	pb "dewpoint/internal/api/gen/dewpoint/v1"
	"dewpoint/internal/spec"
)

func each[A, B any](in []A, f func(A) B) []B {
	if in == nil {
		return nil
	}
	out := make([]B, len(in))
	for i, v := range in {
		out[i] = f(v)
	}
	return out
}

func specOf(r spec.Request) *pb.Spec {
	o := r.Options
	return &pb.Spec{
		Image: r.Image, Name: r.Name, Entrypoint: r.Entrypoint, Cmd: r.Cmd, Env: r.Env,
		Net: r.Net, Ports: each(r.Ports, portOf), Volumes: each(r.Volumes, volumeOf),
		Memory: r.Memory, Cpus: r.CPUs, Ready: r.Ready, ReadyTimeout: durationOf(r.ReadyTimeout),
		Lazy: r.Lazy, Restore: r.Restore, Remove: r.Remove,
		Mount: r.Mount, Order: r.Order, Inflaters: int32(r.Inflaters), Record: r.Record, Checkpoint: r.Checkpoint,
		Labels: r.Labels, Restart: r.Restart, Health: healthOf(r.Health),

		User: o.User, WorkingDir: o.WorkingDir, Hostname: o.Hostname,
		Dns: o.DNS, DnsSearch: o.DNSSearch, DnsOptions: o.DNSOptions, Hosts: o.Hosts,
		ReadOnly: o.ReadOnly, Tmpfs: each(o.Tmpfs, tmpfsOf), ShmSize: o.ShmSize,
		Ulimits: each(o.Ulimits, ulimitOf), Sysctls: o.Sysctls, CapAdd: o.CapAdd, CapDrop: o.CapDrop,
		Privileged: o.Privileged, Devices: each(o.Devices, deviceOf), NoNewPrivileges: o.NoNewPrivileges,
		Init: o.Init, PullPolicy: o.PullPolicy, PidsLimit: o.PidsLimit, Tty: o.TTY, Stdin: o.Stdin,
	}
}

func requestFrom(s *pb.Spec) spec.Request {
	return spec.Request{
		Image: s.GetImage(), Name: s.GetName(), Entrypoint: s.GetEntrypoint(), Cmd: s.GetCmd(), Env: s.GetEnv(),
		Net: s.GetNet(), Ports: each(s.GetPorts(), portFrom), Volumes: each(s.GetVolumes(), volumeFrom),
		Memory: s.GetMemory(), CPUs: s.GetCpus(), Ready: s.GetReady(),
		ReadyTimeout: s.GetReadyTimeout().AsDuration(),
		Lazy:         s.GetLazy(), Restore: s.GetRestore(), Remove: s.GetRemove(),
		Mount: s.GetMount(), Order: s.GetOrder(), Inflaters: int(s.GetInflaters()), Record: s.GetRecord(),
		Checkpoint: s.GetCheckpoint(), Labels: s.GetLabels(), Restart: s.GetRestart(),
		Health: healthFrom(s.GetHealth()), Options: optionsFrom(s),
	}
}

func optionsFrom(s *pb.Spec) spec.Options {
	return spec.Options{
		User: s.GetUser(), WorkingDir: s.GetWorkingDir(), Hostname: s.GetHostname(),
		DNS: s.GetDns(), DNSSearch: s.GetDnsSearch(), DNSOptions: s.GetDnsOptions(), Hosts: s.GetHosts(),
		ReadOnly: s.GetReadOnly(), Tmpfs: each(s.GetTmpfs(), tmpfsFrom), ShmSize: s.GetShmSize(),
		Ulimits: each(s.GetUlimits(), ulimitFrom), Sysctls: s.GetSysctls(),
		CapAdd: s.GetCapAdd(), CapDrop: s.GetCapDrop(), Privileged: s.GetPrivileged(),
		Devices: each(s.GetDevices(), deviceFrom), NoNewPrivileges: s.GetNoNewPrivileges(),
		Init: s.GetInit(), PullPolicy: s.GetPullPolicy(), PidsLimit: s.GetPidsLimit(),
		TTY: s.GetTty(), Stdin: s.GetStdin(),
	}
}

func healthOf(h *spec.Health) *pb.Health {
	if h == nil {
		return nil
	}
	return &pb.Health{Test: h.Test, Interval: durationOf(h.Interval), Timeout: durationOf(h.Timeout),
		StartPeriod: durationOf(h.StartPeriod), StartInterval: durationOf(h.StartInterval),
		Retries: int32(h.Retries)}
}

func healthFrom(h *pb.Health) *spec.Health {
	if h == nil {
		return nil
	}
	return &spec.Health{Test: h.Test, Interval: h.Interval.AsDuration(), Timeout: h.Timeout.AsDuration(),
		StartPeriod: h.StartPeriod.AsDuration(), StartInterval: h.StartInterval.AsDuration(),
		Retries: int(h.Retries)}
}

func tmpfsOf(t spec.Tmpfs) *pb.Tmpfs { return &pb.Tmpfs{Target: t.Target, Options: t.Options} }

func tmpfsFrom(t *pb.Tmpfs) spec.Tmpfs {
	return spec.Tmpfs{Target: t.GetTarget(), Options: t.GetOptions()}
}

func ulimitOf(u spec.Ulimit) *pb.Ulimit { return &pb.Ulimit{Name: u.Name, Soft: u.Soft, Hard: u.Hard} }

func ulimitFrom(u *pb.Ulimit) spec.Ulimit {
	return spec.Ulimit{Name: u.GetName(), Soft: u.GetSoft(), Hard: u.GetHard()}
}

func deviceOf(d spec.Device) *pb.Device {
	return &pb.Device{Source: d.Source, Target: d.Target, Permissions: d.Permissions}
}

func deviceFrom(d *pb.Device) spec.Device {
	return spec.Device{Source: d.GetSource(), Target: d.GetTarget(), Permissions: d.GetPermissions()}
}

func portOf(p spec.Port) *pb.Port {
	return &pb.Port{HostIp: p.HostIP, Host: uint32(p.Host), Container: uint32(p.Container), Protocol: p.Protocol}
}

func portFrom(p *pb.Port) spec.Port {
	return spec.Port{HostIP: p.GetHostIp(), Host: uint16(p.GetHost()), Container: uint16(p.GetContainer()),
		Protocol: p.GetProtocol()}
}

func volumeOf(v spec.Volume) *pb.Volume {
	return &pb.Volume{Source: v.Source, Target: v.Target, ReadOnly: v.ReadOnly}
}

func volumeFrom(v *pb.Volume) spec.Volume {
	return spec.Volume{Source: v.GetSource(), Target: v.GetTarget(), ReadOnly: v.GetReadOnly()}
}

func pullOf(r spec.PullRequest) *pb.PullRequest {
	return &pb.PullRequest{
		Image: r.Image, Lazy: r.Lazy, Blobs: r.Blobs, Order: r.Order,
		Inflaters: int32(r.Inflaters),
	}
}

func pullFrom(r *pb.PullRequest) spec.PullRequest {
	return spec.PullRequest{
		Image: r.Image, Lazy: r.Lazy, Blobs: r.Blobs, Order: r.Order,
		Inflaters: int(r.Inflaters),
	}
}

func recordOf(r spec.Record) *pb.Record {
	return &pb.Record{
		Name: r.Name, Image: r.Image, Digest: r.Digest, Node: r.Node, Stages: r.Stages,
		Bytes: &pb.Bytes{Registry: r.Bytes.Registry, Pop: r.Bytes.PoP, Local: r.Bytes.Local},
		Way:   &pb.Way{Pull: r.Way.Pull, Pack: r.Way.Pack, Start: r.Way.Start, Why: r.Way.Why},
		Error: r.Error, Id: r.ID, Spans: each(r.Spans, spanOf),
	}
}

func spanOf(s spec.Span) *pb.Span {
	return &pb.Span{Name: s.Name, From: s.From, To: s.To, Attributes: s.Attributes}
}

func spanFrom(s *pb.Span) spec.Span {
	return spec.Span{Name: s.GetName(), From: s.GetFrom(), To: s.GetTo(), Attributes: s.GetAttributes()}
}

func recordFrom(r *pb.Record) spec.Record {
	stages := r.GetStages()
	if stages == nil {
		stages = map[string]float64{}
	}
	return spec.Record{
		Name: r.GetName(), Image: r.GetImage(), Digest: r.GetDigest(), Node: r.GetNode(), Stages: stages,
		Bytes: spec.Bytes{Registry: r.GetBytes().GetRegistry(), PoP: r.GetBytes().GetPop(),
			Local: r.GetBytes().GetLocal()},
		Way: spec.Way{Pull: r.GetWay().GetPull(), Pack: r.GetWay().GetPack(), Start: r.GetWay().GetStart(),
			Why: r.GetWay().GetWhy()},
		Error: r.GetError(), ID: r.GetId(), Spans: each(r.GetSpans(), spanFrom),
	}
}

func layerOf(l spec.LayerProgress) *pb.LayerProgress {
	return &pb.LayerProgress{Digest: l.Digest, Size: l.Size, Fetched: l.Fetched, State: l.State, Rate: l.Rate}
}

func layerFrom(l *pb.LayerProgress) spec.LayerProgress {
	return spec.LayerProgress{Digest: l.GetDigest(), Size: l.GetSize(), Fetched: l.GetFetched(),
		State: l.GetState(), Rate: l.GetRate()}
}

func outputOf(c spec.LogChunk) *pb.Output {
	o := &pb.Output{Stream: pb.Output_STREAM_STDOUT, Data: c.Data}
	if c.Stream == spec.Stderr {
		o.Stream = pb.Output_STREAM_STDERR
	}
	return o
}

func chunkFrom(o *pb.Output) spec.LogChunk {
	c := spec.LogChunk{Stream: spec.Stdout, Data: o.GetData()}
	if o.GetStream() == pb.Output_STREAM_STDERR {
		c.Stream = spec.Stderr
	}
	return c
}

func containerOf(c spec.Container) *pb.Container {
	return &pb.Container{
		Name: c.Name, Image: c.Image, Digest: c.Digest, Status: c.Status, ExitCode: int32(c.ExitCode),
		Pid: int32(c.PID),
		Ip:  c.IP, Ports: each(c.Ports, portOf), Created: timeOf(c.Created), Node: c.Node, ReadError: c.ReadError,
		Caller: c.Caller, Restart: c.Restart, Restarts: int32(c.Restarts), CrashLoop: c.CrashLoop,
		NextStart: timeOf(c.NextStart), Health: c.Health, HealthError: c.HealthError,
		Tty: c.TTY, Stdin: c.Stdin,
	}
}

func containerFrom(c *pb.Container) spec.Container {
	return spec.Container{
		Name: c.GetName(), Image: c.GetImage(), Digest: c.GetDigest(), Status: c.GetStatus(),
		ExitCode: int(c.GetExitCode()), PID: int(c.GetPid()),
		IP: c.GetIp(), Ports: each(c.GetPorts(), portFrom), Created: timeFrom(c.GetCreated()), Node: c.GetNode(),
		ReadError: c.GetReadError(), Caller: c.GetCaller(), Restart: c.GetRestart(),
		Restarts: int(c.GetRestarts()), CrashLoop: c.GetCrashLoop(), NextStart: timeFrom(c.GetNextStart()),
		Health: c.GetHealth(), HealthError: c.GetHealthError(),
		TTY: c.GetTty(), Stdin: c.GetStdin(),
	}
}

func imageOf(i spec.Image) *pb.Image {
	return &pb.Image{Name: i.Name, Digest: i.Digest, Size: i.Size, Disk: i.Disk, Created: timeOf(i.Created),
		Layers: each(i.Layers, imageLayerOf)}
}

func imageFrom(i *pb.Image) spec.Image {
	layers := each(i.GetLayers(), imageLayerFrom)
	if layers == nil {
		layers = []spec.Layer{}
	}
	return spec.Image{Name: i.GetName(), Digest: i.GetDigest(), Size: i.GetSize(), Disk: i.GetDisk(),
		Created: timeFrom(i.GetCreated()), Layers: layers}
}

func imageLayerOf(l spec.Layer) *pb.Layer {
	return &pb.Layer{Digest: l.Digest, DiffId: l.DiffID, Size: l.Size, Disk: l.Disk, State: l.State}
}

func imageLayerFrom(l *pb.Layer) spec.Layer {
	return spec.Layer{Digest: l.GetDigest(), DiffID: l.GetDiffId(), Size: l.GetSize(), Disk: l.GetDisk(),
		State: l.GetState()}
}

func findingOf(f spec.Finding) *pb.Finding {
	return &pb.Finding{What: f.What, Level: f.Level, Detail: f.Detail, Remedy: f.Remedy}
}

func findingFrom(f *pb.Finding) spec.Finding {
	return spec.Finding{What: f.GetWhat(), Level: f.GetLevel(), Detail: f.GetDetail(), Remedy: f.GetRemedy()}
}

func versionOf(v spec.Version) *pb.VersionResponse {
	return &pb.VersionResponse{
		Version: v.Version, Node: v.Node, Engine: v.Engine, Mount: v.Mount, Inflater: v.Inflater, Kernel: v.Kernel,
		Go: v.Go,
	}
}

func versionFrom(v *pb.VersionResponse) spec.Version {
	return spec.Version{
		Version: v.Version, Node: v.Node, Engine: v.Engine, Mount: v.Mount, Inflater: v.Inflater, Kernel: v.Kernel,
		Go: v.Go,
	}
}

func eventOf(e spec.Event) *pb.Event {
	p := &pb.Event{Seq: e.Seq, Epoch: e.Epoch, Time: timeOf(e.Time), Kind: e.Kind, Name: e.Name, Image: e.Image,
		Stage: e.Stage, At: e.At, Error: e.Error, Layer: e.Layer, Checkpoint: e.Checkpoint, Health: e.Health}
	if e.ExitCode != nil {
		code := int32(*e.ExitCode)
		p.ExitCode = &code
	}
	if e.Record != nil {
		p.Record = recordOf(*e.Record)
	}
	return p
}

func eventFrom(p *pb.Event) spec.Event {
	e := spec.Event{
		Seq: p.GetSeq(), Epoch: p.GetEpoch(), Time: timeFrom(p.GetTime()), Kind: p.GetKind(), Name: p.GetName(),
		Image: p.GetImage(), Stage: p.GetStage(), At: p.GetAt(), Error: p.GetError(), Layer: p.GetLayer(),
		Checkpoint: p.GetCheckpoint(), Health: p.GetHealth(),
	}
	if p != nil && p.ExitCode != nil {
		code := int(p.GetExitCode())
		e.ExitCode = &code
	}
	if p.GetRecord() != nil {
		r := recordFrom(p.GetRecord())
		e.Record = &r
	}
	return e
}

func execOf(name string, r spec.ExecRequest, stdin bool) *pb.ExecRequest_Start {
	return &pb.ExecRequest_Start{
		Name: name, Args: r.Args, Env: r.Env, User: r.User, Dir: r.Dir, Tty: r.TTY, Stdin: stdin,
		Size: sizeOf(r.Size),
	}
}

func execFrom(s *pb.ExecRequest_Start) spec.ExecRequest {
	return spec.ExecRequest{
		Args: s.GetArgs(), Env: s.GetEnv(), User: s.GetUser(), Dir: s.GetDir(), TTY: s.GetTty(),
		Size: sizeFrom(s.GetSize()),
	}
}

func sizeOf(s spec.Size) *pb.Size {
	if s == (spec.Size{}) {
		return nil
	}
	return &pb.Size{Rows: uint32(s.Rows), Cols: uint32(s.Cols)}
}

func sizeFrom(s *pb.Size) spec.Size {
	return spec.Size{Rows: uint16(min(s.GetRows(), math.MaxUint16)),
		Cols: uint16(min(s.GetCols(), math.MaxUint16))}
}

// durationOf leaves 0, the default, unset.
func durationOf(d time.Duration) *durationpb.Duration {
	if d == 0 {
		return nil
	}
	return durationpb.New(d)
}

// timeOf leaves the zero time unset.
func timeOf(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}

func timeFrom(t *timestamppb.Timestamp) time.Time {
	if t == nil {
		return time.Time{}
	}
	return t.AsTime()
}
