package api

import (
	"context"
	"fmt"
	"strings"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// fields is the role that each field of a request needs, where the call does not need Admin already. A test
// fails for a field that is not here: who adds one decides who may set it. docs/operate/api.md says why.
var fields = map[string]Role{
	"Spec.image": Deploy, "Spec.name": Deploy, "Spec.entrypoint": Deploy, "Spec.cmd": Deploy,
	"Spec.env":     Deploy,
	"Spec.net":     Deploy, // host, which is also the default, by host()
	"Spec.ports":   Deploy,
	"Port.host":    Deploy, // of those that nobody on the node has
	"Port.host_ip": Deploy, "Port.container": Deploy, "Port.protocol": Deploy,
	"Spec.volumes":  Admin,
	"Volume.source": Admin, "Volume.target": Admin, "Volume.read_only": Admin,
	"Spec.memory": Deploy, "Spec.cpus": Deploy,
	"Spec.ready":         Deploy, // asks the container's own address, and runs commands in the container
	"Spec.ready_timeout": Deploy,
	"Spec.lazy":          Deploy,
	"Spec.restore":       Deploy, // from checkpoints of the caller's own, or shared ones
	"Spec.checkpoint":    Deploy, // for the caller's own
	"Spec.plain_http":    Deploy, // has no effect
	"Spec.remove":        Deploy,
	"Spec.restart":       Deploy, // of the caller's own container
	"Spec.health":        Deploy, // runs commands in the container
	"Health.test":        Deploy, "Health.interval": Deploy, "Health.timeout": Deploy,
	"Health.start_period": Deploy, "Health.start_interval": Deploy, "Health.retries": Deploy,
	"Spec.labels": Deploy, "Spec.LabelsEntry.key": Deploy, "Spec.LabelsEntry.value": Deploy,
	"Spec.user": Deploy, "Spec.working_dir": Deploy, "Spec.hostname": Deploy, "Spec.read_only": Deploy,
	"Spec.dns": Deploy, "Spec.dns_search": Deploy, "Spec.dns_options": Deploy, "Spec.hosts": Deploy,
	"Spec.tmpfs": Deploy, "Tmpfs.target": Deploy, "Tmpfs.options": Deploy, // of the container's own memory
	"Spec.shm_size": Deploy, "Spec.no_new_privileges": Deploy, "Spec.cap_drop": Deploy,
	"Spec.init":        Deploy, // the node's own program
	"Spec.pull_policy": Deploy,
	"Spec.pids_limit":  Deploy,
	"Spec.ulimits":     Admin, // rtprio, nice and memlock take from all of the node
	"Ulimit.name":      Admin, "Ulimit.soft": Admin, "Ulimit.hard": Admin,
	"Spec.sysctls": Admin, "Spec.SysctlsEntry.key": Admin, "Spec.SysctlsEntry.value": Admin,
	"Spec.cap_add": Admin, "Spec.privileged": Admin,
	"Spec.devices":  Admin,
	"Device.source": Admin, "Device.target": Admin, "Device.permissions": Admin,
	"Spec.mount":     Admin, // takes the node's loop devices
	"Spec.order":     Admin,
	"Spec.inflaters": Admin, // takes the node's memory
	"Spec.record":    Admin, // what is recorded is a pack for all callers

	"DeployRequest.spec": Deploy, "DeployRequest.attach": Deploy, "DeployRequest.key": Deploy,
	"DeployRequest.deadline":  Deploy,
	"DeployManyRequest.specs": Deploy, "DeployManyRequest.count": Deploy, "DeployManyRequest.parallel": Deploy,
	"DeployManyRequest.key": Deploy, "DeployManyRequest.deadline": Deploy, "DeployManyRequest.detach": Deploy,
	"CancelDeploymentRequest.id": Deploy, "CancelDeploymentRequest.key": Deploy,
	"PullRequest.image": Deploy, "PullRequest.lazy": Deploy, "PullRequest.blobs": Deploy,
	"PullRequest.plain_http": Deploy, // has no effect
	"PullRequest.order":      Admin, "PullRequest.inflaters": Admin,
	"InspectRequest.name": Deploy, "RemoveRequest.name": Deploy, "RemoveRequest.force": Deploy,
	"StopRequest.name": Deploy, "StopRequest.timeout": Deploy, "StartRequest.name": Deploy,
	"RestartRequest.name": Deploy, "RestartRequest.timeout": Deploy,
	"KillRequest.name": Deploy, "KillRequest.signal": Deploy, // of the container's own processes

	"UpdateRequest.name": Deploy, "UpdateRequest.memory": Deploy, "UpdateRequest.cpus": Deploy,
	"UpdateRequest.pids_limit": Deploy, "UpdateRequest.restart": Deploy, // as Spec's

	"ListRequest.all":            Read,
	"ListDeploymentsRequest.all": Read, "ListDeploymentsRequest.limit": Read, "ListDeploymentsRequest.spans": Read,
	"WatchDeploymentRequest.id": Read, "WatchDeploymentRequest.key": Read,
	"LogsRequest.name": Read, "LogsRequest.follow": Read, "LogsRequest.tail": Read,
	"WaitRequest.name": Read, "PackInspectRequest.image": Read, "ListCheckpointsRequest.image": Read,
	"EventsRequest.after": Read, "EventsRequest.epoch": Read,

	"google.protobuf.Duration.seconds": Read, "google.protobuf.Duration.nanos": Read,
}

// fieldName is a field's name as fields has it.
func fieldName(f protoreflect.FieldDescriptor) string {
	return strings.TrimPrefix(string(f.FullName()), "dewpoint.v1.")
}

// may refuses a request that sets a field which the caller may not.
func may(ctx context.Context, msg any) error {
	m, ok := msg.(proto.Message)
	role := callerOf(ctx).role
	if !ok || role == Admin {
		return nil
	}
	name := beyond(m.ProtoReflect(), role)
	if name == "" {
		return nil
	}
	_, short, _ := strings.Cut(name, ".")
	return advised(Permission, fmt.Sprintf("the field %s of a request is for the role admin, and the caller has %s",
		name, role), "leave "+short+" out, or ask an administrator of the node").wire()
}

// beyond is the first field that m sets and the role may not; "" is none.
func beyond(m protoreflect.Message, role Role) (name string) {
	m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		need, known := fields[fieldName(f)]
		switch {
		case !known || need > role:
			name = fieldName(f)
		case f.Message() == nil || f.IsMap():
		case f.IsList():
			for i := 0; i < v.List().Len() && name == ""; i++ {
				name = beyond(v.List().Get(i).Message(), role)
			}
		default:
			name = beyond(v.Message(), role)
		}
		return name == ""
	})
	return name
}

// fielder is an interceptor that lets callers set what they may.
type fielder struct{}

// WrapUnary implements connect.Interceptor.
func (fielder) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		if err := may(ctx, req.Any()); err != nil {
			return nil, err
		}
		return next(ctx, req)
	}
}

// WrapStreamingClient implements connect.Interceptor.
func (fielder) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

// WrapStreamingHandler implements connect.Interceptor.
func (fielder) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) error {
		return next(ctx, &fieldConn{conn, ctx})
	}
}

type fieldConn struct {
	connect.StreamingHandlerConn
	ctx context.Context
}

func (c *fieldConn) Receive(msg any) error {
	if err := c.StreamingHandlerConn.Receive(msg); err != nil {
		return err
	}
	return may(c.ctx, msg)
}
