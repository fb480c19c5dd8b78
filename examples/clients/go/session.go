package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"

	commonv1 "penstock.io/protos/common/v1"
	inferencev1 "penstock.io/protos/inference/v1"
)

// firstID is the id of the request that --abort-after ends.
const firstID = "0"

// session continues all prompts over one stream, and prints each text when it is complete.
func session(ctx context.Context, c client) error {
	ctx, cancel := withDeadline(ctx, c.timeout)
	defer cancel()
	stream, err := c.GenerateSession(ctx)
	if err != nil {
		return err
	}
	answers := answers{texts: map[string]string{}, abortAfter: c.abortAfter, abort: make(chan bool, 1)}
	go sendRequests(ctx, stream, c.options, answers.abort)
	for {
		response, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return answers.err
		}
		if err != nil {
			return err
		}
		answers.take(response)
	}
}

// sendRequests sends all requests. With --abort-after, it then aborts the first request if it receives true from abort. If
// the stream has failed, Recv returns the error.
func sendRequests(
	ctx context.Context, stream inferencev1.InferenceService_GenerateSessionClient, opts options, abort <-chan bool,
) {
	for number, prompt := range opts.texts {
		request := opts.generateRequest(prompt)
		request.RequestId = strconv.Itoa(number)
		message := &inferencev1.GenerateSessionRequest_Generate{Generate: request}
		if stream.Send(&inferencev1.GenerateSessionRequest{Message: message}) != nil {
			return
		}
	}
	if opts.abortAfter > 0 {
		select {
		case <-ctx.Done():
			return
		case wanted := <-abort:
			message := &inferencev1.GenerateSessionRequest_AbortRequestId{AbortRequestId: firstID}
			if wanted && stream.Send(&inferencev1.GenerateSessionRequest{Message: message}) != nil {
				return
			}
		}
	}
	stream.CloseSend()
}

// answers collects the outputs of a session's requests.
type answers struct {
	texts      map[string]string // text of each request so far, by request id
	err        error             // whether a request failed
	abortAfter int64             // messages of the first request until it is aborted; 0: decided
	abort      chan bool         // whether to abort the first request
}

// take processes a message. It prints a text that is complete, or the error of a request.
func (a *answers) take(response *inferencev1.GenerateSessionResponse) {
	if failed := response.GetError(); failed != nil {
		fmt.Fprint(os.Stderr, describeOne(failed))
		a.err = errReported
		a.count(failed.GetRequestId(), true)
		return
	}
	output := response.GetOutput()
	id, reason := output.GetRequestId(), output.GetFinishReason()
	a.texts[id] += output.GetText()
	ended := reason != commonv1.FinishReason_FINISH_REASON_UNSPECIFIED
	switch {
	case reason == commonv1.FinishReason_FINISH_REASON_ABORT:
		fmt.Printf("[%s] %s (aborted)\n", id, a.texts[id])
	case ended:
		fmt.Printf("[%s] %s\n", id, a.texts[id])
	}
	a.count(id, ended)
}

// count decides whether to abort the first request.
func (a *answers) count(id string, ended bool) {
	if id != firstID || a.abortAfter == 0 {
		return
	}
	if a.abortAfter--; ended {
		a.abortAfter = 0
	}
	if a.abortAfter == 0 {
		a.abort <- !ended
	}
}
